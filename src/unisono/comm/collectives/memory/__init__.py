"""Sums of whole gradient buffers in memory that all ranks of one host see; see `live`."""

from typing import TYPE_CHECKING

from unisono.comm.collectives import Collective
from unisono.spec.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from unisono.comm.collectives.memory.live import MemoryAlgorithm


class InMemory(Collective):
    """Gradients are added up where they lie, in memory that all ranks of a host see; what else there is, the engine."""

    name = "memory"
    counted = False
    nearby = True

    def bind(self, pg: "ProcessGroup", axis: str) -> "MemoryAlgorithm":
        from unisono.comm.collectives.memory.live import MemoryAlgorithm, sees_all

        if not sees_all(pg):
            raise UsageError(
                f"collective={self.name}: the ranks of {axis} do not see each other's memory: they are on several "
                "hosts, in several containers, or on GPUs",
                where="plan.collective",
                fix="collective=auto, or collective=messages",
                code="P20",
            )
        return MemoryAlgorithm(self, pg)
