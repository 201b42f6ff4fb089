"""Messages between GPUs: each direction between two ranks has a queue of its own.

NCCL plays what a rank asks of one communicator in the order in which it was asked. A receive that is asked for early
holds up the send behind it, and two ranks that wait so for each other stand still. torch keeps a communicator for each
pair of ranks of a group, so two groups are enough: one for messages to higher ranks, one for those to lower ones.

torch makes such a communicator with the first message, and NCCL connects it with the first one in each direction. Both
hold up the rank itself until the other one is there too, while a receive that was asked for keeps its GPU from loading
what it needs. So all that a ring of ranks needs is made before the first step.
"""

import torch
from torch import Tensor

from unisono.comm.collectives import Pending
from unisono.comm.device import has_numbers, is_apart, synchronize
from unisono.comm.group import Group


class PairQueues:
    """The queues of a group's members. up: for messages to higher ranks. down: to lower ones."""

    def __init__(self, up: Group, down: Group) -> None:
        self._up, self._down = up, down

    def says(self) -> str:
        """For the start of a run."""
        return f"{self._up.axis}: a queue for each direction between two GPUs"

    def start_send(self, x: Tensor, to: int) -> Pending:
        """As `Group.start_send`."""
        return (self._up if to > self._up.index else self._down).start_send(x, to)

    def start_recv(self, out: Tensor, source: int) -> Pending:
        """As `Group.start_recv`."""
        return (self._up if source < self._up.index else self._down).start_recv(out, source)


def pairs_of(group: Group, device: torch.device) -> PairQueues | None:
    """Queues between the neighbours in the ring of a group of GPUs, ready for use; None on CPUs, whose messages pass
    each other. Every member calls it, or it hangs."""
    if group.pg is None or not is_apart(device) or not has_numbers(device):
        return None
    up, down = group, group.apart()
    _open(up, device, upwards=True)
    _open(down, device, upwards=False)
    return PairQueues(up, down)


def _open(way: Group, device: torch.device, upwards: bool) -> None:
    """One message between each two neighbours, in the direction that the queue is for. All ranks take the pairs in one
    order: none waits in a circle."""
    ring = {tuple(sorted((i, (i + 1) % way.size))) for i in range(way.size)}
    x = torch.zeros(1, device=device)
    for pair in sorted(ring):
        sender, receiver = pair if upwards else pair[::-1]
        if way.index == sender:
            way.start_send(x, receiver).wait()
        elif way.index == receiver:
            way.start_recv(x, sender).wait()
    synchronize(device)
