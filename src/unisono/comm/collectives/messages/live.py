"""Gathers, exchanges and sums between CPUs: messages whose receives are posted before any is sent.

Gloo's sender waits for word that its receiver is ready, and that word takes the same connection as the data. Gloo's
own all-gather and all-to-all post sends first, so the word for one direction queues behind the data of the other, and
a link between hosts carries now the one, now the other (benchmarks/wire.py).

Parts lie one after the other, in the order of the members of `pg`; tensors are contiguous.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.comm.algorithm import Algorithm, Done, Once, Pending
from unisono.comm.collectives.messages import SMALL
from unisono.comm.tree import tree_sum


@dataclass
class InFlight(Once):
    """Messages under way. After `wait`, what was received is there and what was sent may change."""

    works: list[dist.Work]

    def end(self) -> None:
        while self.works:  # one that is over would be waited for until its deadline
            self.works[0].wait()
            del self.works[0]


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
    InFlight(going).wait()


def start_gather(out: Tensor, part: Tensor, pg: dist.ProcessGroup) -> InFlight:
    """As gather, but returns at once; every member sends to every other one."""
    return exchanged(out.view(-1).chunk(pg.size()), [part] * pg.size(), pg)


def start_exchange(out: Tensor, x: Tensor, pg: dist.ProcessGroup) -> InFlight:
    """x [size · n, ...] → out of the same shape: part i is what member i has as this member's part (all-to-all)."""
    return exchanged(out.view(-1).chunk(pg.size()), x.view(-1).chunk(pg.size()), pg)


def start_small_sum(x: Tensor, op: Any, pg: dist.ProcessGroup) -> Pending:
    """x of every member reduced in place after `wait`, in one round: everybody gets all of them."""
    each = x.new_empty((pg.size(), *x.shape))
    return _OneShot(x, each, op, start_gather(each, x, pg))


class MessageAlgorithm(Algorithm):
    """Gathers along a ring, or from everybody at once where there is other work meanwhile; sums of small tensors by
    gathering all of them, of others by exchanging parts, each of which one member adds up."""

    def all_reduce(self, x: Tensor, op: Any) -> Pending:
        if x.nbytes * (self.pg.size() - 1) <= SMALL:
            return start_small_sum(x, op, self.pg)
        whole = x.view(-1)
        if missing := -x.numel() % self.pg.size():
            whole = torch.cat([whole, whole.new_zeros(missing)])
        parts = torch.empty_like(whole)
        return _TwoShot(x, whole, parts, op, self.pg, start_exchange(parts, whole, self.pg))

    def all_gather(self, out: Tensor, part: Tensor, later: bool = False) -> Pending:
        if later:
            return start_gather(out, part, self.pg)
        gather(out, part, self.pg)
        return Done()

    def exchange(self, out: Tensor, x: Tensor) -> Pending:
        return start_exchange(out, x, self.pg)


@dataclass
class _OneShot(Once):
    """A small sum under way: all tensors come to everybody, who reduces them."""

    x: Tensor
    each: Tensor
    op: Any
    coming: InFlight

    def end(self) -> None:
        self.coming.wait()
        self.x.copy_(_reduced(self.each.unbind(0), self.op))


@dataclass
class _TwoShot(Once):
    """A sum under way: parts come, are reduced here and go to everybody."""

    x: Tensor
    whole: Tensor
    parts: Tensor
    op: Any
    pg: dist.ProcessGroup
    coming: InFlight

    def end(self) -> None:
        self.coming.wait()
        start_gather(self.whole, _reduced(self.parts.chunk(self.pg.size()), self.op), self.pg).wait()
        if self.whole.data_ptr() != self.x.data_ptr():
            self.x.copy_(self.whole[: self.x.numel()].view_as(self.x))


def _reduced(each: Sequence[Tensor], op: Any) -> Tensor:
    """One tensor of everybody's, in an order that is the same on all."""
    if op == dist.ReduceOp.SUM:
        return tree_sum(each)
    return torch.stack(tuple(each)).amax(0) if op == dist.ReduceOp.MAX else torch.stack(tuple(each)).amin(0)


def agreed(pg: dist.ProcessGroup, tag: int = 0) -> InFlight:
    """A pending operation that ends when every member has begun it. tag: tells it apart from others under way."""
    words = torch.zeros(pg.size()).split(1)
    return exchanged(words, [torch.zeros(1)] * pg.size(), pg, tag)


def exchanged(
    into: Sequence[Tensor], parts: Sequence[Tensor], pg: dist.ProcessGroup, tag: int = 0
) -> InFlight:
    """Begin to send part i to member i; what member i sends comes into place i. tag: as of `agreed`."""
    if parts[0].numel() == 0:
        return InFlight([])
    index, size = pg.rank(), pg.size()
    others = [(index + i) % size for i in range(1, size)]
    works = [pg.recv([into[i]], i, tag) for i in reversed(others)]
    works += [pg.send([parts[i]], i, tag) for i in others]
    into[index].copy_(parts[index].view(-1))
    return InFlight(works)
