"""Gathers and exchanges between processors: messages whose receives are posted before any is sent.

Gloo's sender waits for word that its receiver is ready, and that word takes the same connection as the data. Gloo's
own all-gather and all-to-all post sends first, so the word for one direction queues behind the data of the other, and
a link between hosts carries now the one, now the other (benchmarks/wire.py).

Parts lie one after the other, in the order of the members of `pg`; tensors are contiguous.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.comm.tree import tree_sum

# Bytes that come to a member: below, what a sum costs is its rounds, of which an all-reduce has more.
SMALL = 1 << 16


@dataclass(slots=True)
class Messages:
    """Messages under way. Pending: see comm.group."""

    works: list[dist.Work]

    def wait(self) -> None:
        """Returns when what was received is there and what was sent may change. Raises what the process group raises
        where a member is gone or late."""
        for work in self.works:
            work.wait()


def gather(out: Tensor, part: Tensor, pg: dist.ProcessGroup) -> None:
    """part [n, ...] of every member → out [size · n, ...], along a ring: between hosts each part crosses once."""
    if part.numel() == 0:
        return
    index, size = pg.rank(), pg.size()
    slots = out.view(-1).chunk(size)
    left, right = (index - 1) % size, (index + 1) % size
    coming = [pg.recv([slots[(index - i) % size]], left, 0) for i in range(1, size)]
    going = [pg.send([part], right, 0)]
    slots[index].copy_(part.view(-1))
    for i, arrival in enumerate(coming, 1):
        arrival.wait()
        if i < size - 1:
            going.append(pg.send([slots[(index - i) % size]], right, 0))
    Messages(going).wait()


def start_gather(out: Tensor, part: Tensor, pg: dist.ProcessGroup) -> Messages:
    """As gather, but returns at once; every member sends to every other one."""
    return _start(out.view(-1).chunk(pg.size()), [part] * pg.size(), pg)


def start_exchange(out: Tensor, x: Tensor, pg: dist.ProcessGroup) -> Messages:
    """x [size · n, ...] → out of the same shape: part i is what member i has as this member's part (all-to-all)."""
    return _start(out.view(-1).chunk(pg.size()), x.view(-1).chunk(pg.size()), pg)


def reduce_small(x: Tensor, op: dist.ReduceOp.RedOpType, pg: dist.ProcessGroup) -> None:
    """Sum, greatest or least of every member's x, in place: all gather all and each reduces, in one order."""
    each = x.new_empty((pg.size(), *x.shape))
    gather(each, x, pg)
    if op == dist.ReduceOp.SUM:
        x.copy_(tree_sum(each.unbind(0)))
    else:
        x.copy_(each.amax(0) if op == dist.ReduceOp.MAX else each.amin(0))


def reduces(x: Tensor, op: dist.ReduceOp.RedOpType, size: int) -> bool:
    """Whether `reduce_small` is for this."""
    known = op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN)
    return known and x.device.type == "cpu" and x.is_contiguous() and x.nbytes * (size - 1) <= SMALL


def agreed(pg: dist.ProcessGroup) -> Messages:
    """A pending operation that ends when every member has begun it."""
    return start_gather(torch.zeros(pg.size()), torch.zeros(1), pg)


def _start(into: Sequence[Tensor], parts: Sequence[Tensor], pg: dist.ProcessGroup) -> Messages:
    """Part i goes to member i; what member i sends comes into place i."""
    if parts[0].numel() == 0:
        return Messages([])
    index, size = pg.rank(), pg.size()
    others = [(index + i) % size for i in range(1, size)]
    works = [pg.recv([into[i]], i, 0) for i in reversed(others)]
    works += [pg.send([parts[i]], i, 0) for i in others]
    into[index].copy_(parts[index].view(-1))
    return Messages(works)
