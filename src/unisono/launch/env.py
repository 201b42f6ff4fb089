"""Ranks that others started: who am I, according to torchrun, plain variables, Slurm or MPI? No torch.

The one file of the package that reads the process environment for ranks. Order: torchrun > plain RANK/WORLD_SIZE >
Slurm step > Open MPI > PMI. A set that is there in part is an error, not a guess.
"""

import importlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from unisono.launch.supervise import Outcome
from unisono.spec.errors import UsageError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Started:
    """A rank's place as its starter told it; `source` says which starter."""

    source: str
    rank: int
    world: int
    local_rank: int
    local_world: int
    master: str
    port: int
    restart: int = 0
    error_file: str = ""
    run_id: str = ""


def detect(environ: Mapping[str, str]) -> Started | None:
    """The place that `environ` describes, None when nobody else started us. Raises UsageError (U-L02)."""
    if "TORCHELASTIC_RUN_ID" in environ:
        return _plain(environ, "torchrun")
    if "RANK" in environ or "WORLD_SIZE" in environ or "LOCAL_RANK" in environ:
        place = _plain(environ, "environment")
        _agree(place, environ)
        return place
    if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ:
        return _slurm(environ)
    if "OMPI_COMM_WORLD_RANK" in environ:
        return _mpi(environ, "Open MPI", "OMPI_COMM_WORLD_{}", ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    if "PMI_RANK" in environ:
        return _mpi(environ, "PMI", "{}", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"))
    return None


def place_here() -> Started | None:
    """`detect` on this process's own environment, for programs that are a rank themselves."""
    return detect(os.environ)


def _plain(environ: Mapping[str, str], source: str) -> Started:
    known = dict(environ)
    if known.get("MASTER_ADDR") in LOOPBACK:
        # All on one host: the local numbers are the global ones.
        known.setdefault("LOCAL_RANK", known.get("RANK", ""))
        known.setdefault("LOCAL_WORLD_SIZE", known.get("WORLD_SIZE", ""))
    names = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"]
    _require(known, names, source)
    local_rank = _number(known, "LOCAL_RANK")
    return _checked(
        Started(
            source=source,
            rank=_number(known, "RANK"),
            world=_number(known, "WORLD_SIZE"),
            local_rank=local_rank,
            local_world=_number(known, "LOCAL_WORLD_SIZE", default=local_rank + 1),
            master=known["MASTER_ADDR"],
            port=_number(known, "MASTER_PORT"),
            restart=_number(known, "TORCHELASTIC_RESTART_COUNT", default=0),
            error_file=known.get("TORCHELASTIC_ERROR_FILE", ""),
            run_id=known.get("TORCHELASTIC_RUN_ID", ""),
        )
    )


def _slurm(environ: Mapping[str, str]) -> Started:
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    _require(environ, ["SLURM_PROCID", tasks, "SLURM_LOCALID", "SLURM_JOB_ID"], "Slurm")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    job = _number(environ, "SLURM_JOB_ID")
    local_rank = _number(environ, "SLURM_LOCALID")
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    index = _number(environ, "SLURM_NODEID", default=0)
    return _checked(
        Started(
            source="Slurm",
            rank=_number(environ, "SLURM_PROCID"),
            world=_number(environ, tasks),
            local_rank=local_rank,
            local_world=_tasks_on(per_node, index) or local_rank + 1,
            master=environ.get("MASTER_ADDR") or first_host(nodes) or "127.0.0.1",
            # Jobs that share a node must not meet; two jobs rarely have numbers 16384 apart.
            port=_number(environ, "MASTER_PORT", default=16384 + job % 16384),
            restart=_number(environ, "SLURM_RESTART_COUNT", default=0),
            run_id=str(job),
        )
    )


def _mpi(environ: Mapping[str, str], source: str, form: str, names: tuple[str, ...]) -> Started:
    rank, size, local_rank, local_size = (form.format(name) for name in names)
    _require(environ, [rank, size, local_rank, local_size], source)
    world, local_world = _number(environ, size), _number(environ, local_size)
    if world != local_world:
        _require(environ, ["MASTER_ADDR"], f"{source} on several hosts")
    return _checked(
        Started(
            source=source,
            rank=_number(environ, rank),
            world=world,
            local_rank=_number(environ, local_rank),
            local_world=local_world,
            master=environ.get("MASTER_ADDR", "127.0.0.1"),
            port=_number(environ, "MASTER_PORT", default=DEFAULT_PORT),
        )
    )


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: `gpu[07-09,12],login` gives gpu07."""
    match = re.match(r"([^\[,]*)(?:\[(\d+))?", nodes)
    return (match[1] + (match[2] or "")) if match else ""


def _tasks_on(per_node: str, index: int) -> int:
    """Tasks on node `index` of a Slurm list like `4(x2),3`; 0 when it does not say."""
    counts: list[int] = []
    for match in re.finditer(r"(\d+)(?:\(x(\d+)\))?", per_node):
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[index] if index < len(counts) else 0


def _agree(place: Started, environ: Mapping[str, str]) -> None:
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return
    other = _slurm(environ)
    if (other.rank, other.world) != (place.rank, place.world):
        raise UsageError(
            f"the environment says rank {place.rank} of {place.world}, Slurm says {other.rank} of {other.world}",
            where="RANK, WORLD_SIZE against SLURM_PROCID, SLURM_NTASKS",
            fix="unset RANK and WORLD_SIZE, or start with torchrun",
            code="L02",
        )


def _require(environ: Mapping[str, str], names: list[str], source: str) -> None:
    missing = [name for name in names if not environ.get(name)]
    if missing:
        present = [name for name in names if environ.get(name)]
        raise UsageError(
            f"started by {source}, but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set",
            where=f"process environment; set: {', '.join(present)}",
            fix="set all of them, or none to start the ranks from here",
            code="L02",
        )


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise UsageError(
            f"{name} is {text!r}, not a number", where="process environment", code="L02"
        ) from None


def _checked(place: Started) -> Started:
    if not 0 <= place.rank < place.world or not 0 <= place.local_rank < place.local_world <= place.world:
        raise UsageError(
            f"{place.source} says rank {place.rank} of {place.world}, {place.local_rank} of {place.local_world} here",
            where="process environment",
            fix="ranks count from 0 and stay below the size",
            code="L02",
        )
    return place


def run_in_env(
    entry: str,
    argument: dict[str, Any],
    show: Callable[[int, dict[str, Any]], None] | None = None,
    environ: Mapping[str, str] = os.environ,
    threads: int | None = None,
    backend: str = "auto",
    timeout: float = 600.0,
) -> Outcome:
    """Be the rank that `environ` describes and run `entry` in this very process, importing torch.

    `show` hears rank 0's events. `timeout` in seconds, for meeting the others and for each collective's store.
    Errors are in the Outcome; the caller leaves by `context.flush_and_leave(outcome.exit)`.
    """
    place = detect(environ)
    if place is None:
        raise UsageError("no rank in the process environment", fix="start with torchrun", code="L02")
    body = importlib.import_module("unisono.launch.rank_env")  # imports torch, which detection must not
    return body.run(place, entry, argument, show, threads, backend, timeout)
