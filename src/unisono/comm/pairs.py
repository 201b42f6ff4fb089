"""Messages between GPUs: each direction between two ranks has a queue of its own.

NCCL plays what a rank asks of one communicator in the order in which it was asked. A receive that is asked for early
holds up the send behind it, and two ranks that wait so for each other stand still. torch keeps a communicator for each
pair of ranks of a group, so two groups are enough: one for messages to higher ranks, one for those to lower ones.

torch makes such a communicator with the first message. That takes the whole GPU, which a receive that is under way
never lets go of. So all that a ring of ranks needs is made before the first step.
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
    found = PairQueues(group, group.apart())
    for way in (found._up, found._down):
        _open(way, device)
    return found


def _open(way: Group, device: torch.device) -> None:
    """One message between each two neighbours. All ranks take the pairs in one order: none waits in a circle."""
    ring = {tuple(sorted((i, (i + 1) % way.size))) for i in range(way.size)}
    x = torch.zeros(1, device=device)
    for low, high in sorted(ring):
        if way.index == low:
            way.start_send(x, high).wait()
        elif way.index == high:
            way.start_recv(x, low).wait()
    synchronize(device)
