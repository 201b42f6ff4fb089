"""What meets in memory that all ranks of one host see: whole gradient buffers, and large tensors; see `live`."""

from typing import TYPE_CHECKING

from unisono.comm.collectives import Collective
from unisono.spec.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from unisono.comm.collectives.memory.live import MemoryAlgorithm


# Bytes of a member's tensor from which a pass through memory is quicker than messages (`unisono bench collectives`).
LARGE = {"all_reduce": 8 << 20, "all_gather": 1 << 20, "all_to_all": 8 << 20, "reduce_scatter": 2 << 20}

LENT = 2 << 20
"""Bytes of a whole vector from which operations on memory that is lent are quicker than messages."""


def passes(op: str, x: "Tensor") -> bool:
    """Whether x passes through memory, where ranks see each other's."""
    return x.nbytes >= LARGE[op] and x.is_contiguous()


class InMemory(Collective):
    """Gradients are added up where they lie, in memory that all ranks of a host see, and what is large passes through
    it; what is small, the engine."""

    name = "memory"
    counted = False

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
