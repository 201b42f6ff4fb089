"""Keys and values on their way round a ring, and their gradients on their way home.

Each rank sends what it has to the next one and meanwhile computes with it. In backward the sum of a block's gradients
follows the block, one step behind, so that a sum on its way is hidden by the next block's computing.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.comm.collectives.messages.live import InFlight
from unisono.comm.gone import started
from unisono.comm.group import Group, Pending
from unisono.parallel.online import GradOf, See


class Ring:
    """Shows every rank's keys and values to every rank, each at most one message away from where it was."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def show(self, part: Tensor, see: See) -> None:
        """see(rank, keys and values) for each rank of the group, this one first."""
        here, group = part, self.group
        for step in range(group.size):
            arriving, pending = self._pass_on(here, step)
            see((group.index - step) % group.size, here)
            here = self._arrived(arriving, pending)

    def collect(self, part: Tensor, grad_of: GradOf) -> Tensor:
        """The sum over all ranks of grad_of(this rank, its keys and values)."""
        here, group = part, self.group
        kept: Tensor | None = None  # what this rank adds to its own
        total: Tensor | None = None
        home: Pending | None = None
        for step in range(group.size):
            arriving, pending = self._pass_on(here, step)
            grad = grad_of((group.index - step) % group.size, here)
            if total is not None:
                grad += self._arrived(total, home)
            if step == 0:
                kept = grad
            else:
                total = torch.empty_like(grad)
                home = start_pass(group, total, grad)
            here = self._arrived(arriving, pending)
        return kept + self._arrived(total, home)  # type: ignore[arg-type,operator]

    def _pass_on(self, here: Tensor, step: int) -> tuple[Tensor, Pending | None]:
        """Begin to send `here` on, if another rank has yet to see it; (where the next arrives, what to wait for)."""
        if step == self.group.size - 1:
            return here, None
        arriving = torch.empty_like(here)
        return arriving, start_pass(self.group, arriving, here)

    def _arrived(self, x: Tensor, pending: Pending | None) -> Tensor:
        if pending is not None:
            with self.group.recorder.span("wait", axis=self.group.axis, op="recv"):
                pending.wait()
        return x


def start_pass(group: Group, out: Tensor, x: Tensor) -> Pending:
    """Send x to the next rank of the group and receive into `out` from the one before, the last being before the first.
    x must not change before `wait`. Every member of a group of two or more calls it, or it hangs."""
    group.recorder.count(group.axis, "send", x.nbytes)
    before, behind = group.ranks[group.index - 1], group.ranks[(group.index + 1) % group.size]
    # Both at once: of a backend that runs a group's messages in order, two sends would wait for each other.
    ends = [dist.P2POp(dist.irecv, out, before, group.pg), dist.P2POp(dist.isend, x, behind, group.pg)]
    return started(group.pg, f"the ring of {group.axis}", _begun, ends)


def _begun(ends: list[dist.P2POp]) -> InFlight:
    return InFlight(dist.batch_isend_irecv(ends))
