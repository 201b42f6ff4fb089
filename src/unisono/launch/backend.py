"""Which backend of torch.distributed serves the ranks of a host, and why: one table of what is asked and what is there.

Gloo serves CPUs, NCCL serves GPUs of which each rank has its own. MPI is no backend here but `collective=mpi`, which
needs an MPI that started the ranks. No torch: `comm.device` says what torch was built with.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from unisono.spec.errors import UsageError

CPUS, GPUS, SHARED = "gloo", "nccl", "nccl:shared"
SIM = "sim"
DEVICES = {"cpu": CPUS, "gpu": GPUS}  # by which people call them
# By which NCCL knows a host. It refuses two ranks of one host on one GPU, and not those of two.
HOST_ID = "NCCL_HOSTID"


@dataclass(frozen=True, slots=True)
class Equipment:
    """What one host has for its ranks. gpus: that a process may use. built: backends that torch was built with. mpi:
    whether there are mpirun and mpi4py. visible: what CUDA_VISIBLE_DEVICES says."""

    gpus: int
    built: frozenset[str]
    mpi: bool = False
    visible: str = ""

    def says(self) -> str:
        """Say for each backend whether this host has it: a line of `unisono doctor`."""
        nccl = (
            "built, and no GPU" if GPUS in self.built and not self.gpus else f"for {many(self.gpus, 'GPU')}"
        )
        return (
            f"gloo {'for CPUs' if CPUS in self.built else 'not built'}, "
            f"nccl {nccl if GPUS in self.built else 'not built'}, "
            f"mpi {'by collective=mpi' if self.mpi else 'not there (mpirun and mpi4py)'}"
        )


@dataclass(frozen=True, slots=True)
class Backend:
    """name: as torch calls it. why: in a few words. note: what a user may not have meant; "" if nothing."""

    name: str
    why: str
    note: str = ""


def choose(wanted: str, ranks: int, has: Equipment) -> Backend:
    """The backend of `ranks` ranks on one host. wanted: `auto`, `gloo`, `nccl`, `nccl:shared` or `sim`. Raises
    UsageError L08 for what cannot be had, with a remedy."""
    if wanted.partition(":")[0] == SIM:
        return Backend(wanted, "as asked for: each rank has a simulated device of its own")
    if wanted in (GPUS, SHARED):
        return _nccl(ranks, has, wanted == SHARED)
    if wanted == "auto" and has.gpus >= ranks and GPUS in has.built:
        return Backend(GPUS, "each rank has a GPU of its own")
    if CPUS not in has.built:
        fix = "launch.backend=nccl with a GPU for each rank" if GPUS in has.built else "a torch with Gloo"
        raise _refused(wanted, "torch was built without Gloo, which serves CPUs", f"{fix}; or one rank")
    if wanted == CPUS:
        idle = f"; {many(has.gpus, 'GPU')} idle" if has.gpus else ""
        return Backend(CPUS, f"as asked for: ranks compute on CPUs{idle}")
    if not has.gpus:
        named = GPUS in has.built and has.visible not in ("", "-1")
        under = f"none under CUDA_VISIBLE_DEVICES={has.visible}: ranks compute on CPUs" if named else ""
        return Backend(CPUS, "no GPU on this host", under and f"no GPU on this host, or {under}")
    if GPUS not in has.built:
        why = "torch was built without NCCL, so ranks compute on CPUs"
        return Backend(
            CPUS, why, f"{many(has.gpus, 'GPU')} on this host, and {why}; pip install a torch with CUDA"
        )
    idle = (
        f"{ranks} ranks and {many(has.gpus, 'GPU')} on this host: all compute on CPUs; a plan of "
        f"{many(has.gpus, 'rank')} uses the GPUs, launch.backend=gloo says that CPUs are meant"
    )
    return Backend(CPUS, f"{ranks} ranks, {many(has.gpus, 'GPU')}", idle)


def visible(environ: Mapping[str, str]) -> str:
    """Which GPUs the environment leaves to a process, in its own words; "" for all."""
    return environ.get("CUDA_VISIBLE_DEVICES", "")


def has_mpi() -> bool:
    """Whether this Python can have MPI's collectives: mpirun in its path, and mpi4py."""
    return shutil.which("mpirun") is not None and find_spec("mpi4py") is not None


def many(count: int, noun: str) -> str:
    """`1 GPU`, `4 GPUs`."""
    return f"{count} {noun}{'s' * (count != 1)}"


def settings(wanted: str, host: str, rank: int) -> dict[str, str]:
    """Environment variables that a rank sets before NCCL begins: where ranks share a GPU, each is a host by itself."""
    return {HOST_ID: f"{host}-{rank}"} if wanted == SHARED else {}


def _nccl(ranks: int, has: Equipment, shared: bool) -> Backend:
    if GPUS not in has.built:
        fix = "pip install a torch with CUDA; or launch.backend=gloo"
        raise _refused(GPUS, "torch was built without NCCL", fix)
    if not has.gpus:
        fix = "launch.backend=auto or gloo; nvidia-smi and CUDA_VISIBLE_DEVICES say what is there"
        raise _refused(GPUS, "NCCL serves GPUs, and this process sees none", fix)
    if ranks > has.gpus and shared:
        why = f"as asked for: {many(ranks, 'rank')} take turns on {many(has.gpus, 'GPU')}"
        return Backend(GPUS, why, f"{why}: for trying a plan, its speed says nothing")
    if ranks > has.gpus:
        fix = f"{many(has.gpus, 'rank')} on this host; launch.backend=nccl:shared to try the plan, or gloo for CPUs"
        raise _refused(
            GPUS, f"{ranks} ranks on {many(has.gpus, 'GPU')}: NCCL lets no two ranks share one", fix
        )
    return Backend(GPUS, "as asked for: each rank has a GPU of its own")


def _refused(wanted: str, why: str, fix: str) -> UsageError:
    return UsageError(
        f"backend {wanted} cannot serve these ranks: {why}", where="launch.backend", fix=fix, code="L08"
    )
