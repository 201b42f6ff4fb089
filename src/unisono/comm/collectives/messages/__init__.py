"""Messages between CPUs whose receives are posted before any is sent; see `live`."""

from typing import TYPE_CHECKING

from unisono.comm.collectives import Collective, for_cpus

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from unisono.comm.collectives.messages.live import MessageAlgorithm

# Bytes that one member receives. The time of a sum of fewer bytes is that of its rounds of messages, and to gather all
# tensors takes fewer rounds than an all-reduce.
SMALL = 1 << 16


class Messages(Collective):
    """Messages from every rank to every other one, received in the order of the ranks; between CPUs."""

    name = "messages"

    def sent(self, op: str, nbytes: int, size: int) -> int:
        if op == "all_reduce" and nbytes * (size - 1) <= SMALL:
            return nbytes * (size - 1)  # each sends its tensor to all others, and each adds up
        return super().sent(op, nbytes, size)

    def bind(self, pg: "ProcessGroup", axis: str) -> "MessageAlgorithm":
        from unisono.comm.collectives.messages.live import MessageAlgorithm
        from unisono.comm.device import between_cpus

        if not between_cpus(pg):
            raise for_cpus(self.name, axis)
        return MessageAlgorithm(self, pg)
