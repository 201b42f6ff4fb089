"""Passing on: every rank of a group sends to the next one and receives from the one before."""

import torch.distributed as dist
from torch import Tensor

from unisono.comm.collectives.messages.live import InFlight
from unisono.comm.gone import started
from unisono.comm.group import Group, Pending


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
