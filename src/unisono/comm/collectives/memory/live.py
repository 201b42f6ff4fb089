"""Buffers that the ranks of one host all have in their memory: a sum over them sends nothing.

Two small collectives say when all gradients are there and when all sums are. Between them each rank adds up its part of
everybody's buffer and writes the sum to all: a pass through memory, where messages over loopback copy everything four
times. What lies elsewhere is brought there and back: see `passing`. Outputs of gathers and inputs of scattered sums can
lie there as well: see `lending`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.comm.algorithm import Collective, Once, Pending
from unisono.comm.collectives.engine.live import EngineAlgorithm
from unisono.comm.collectives.memory import LENT, passes
from unisono.comm.collectives.memory.lending import Lending
from unisono.comm.collectives.memory.mapping import mapped, part_of
from unisono.comm.collectives.memory.passing import SharedRoom
from unisono.comm.collectives.messages import SMALL
from unisono.comm.collectives.messages.live import InFlight, agreed, start_small_sum
from unisono.comm.device import between_cpus, is_apart

_OPS = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN)
_PIECE = 1 << 15  # elements of a sum that fit into the CPU's second cache


@dataclass
class BufferSum(Once):
    """A sum under way over `buffers`, one a member, in order; `index` is this rank's. After `wait` it is in all their
    buffers, the same bits in all."""

    pg: dist.ProcessGroup
    buffers: Sequence[Tensor]
    index: int
    there: InFlight

    def end(self) -> None:
        self.there.wait()
        with torch.no_grad():
            for total, others in pieces_added(self.buffers, self.index):
                for other in others:
                    other.copy_(total)
        agreed(self.pg).wait()


def pieces_added(buffers: Sequence[Tensor], index: int) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Add up the part of member `index` of everybody's buffers into its own, piece by piece. Yields each piece of the
    sum, and the same piece of the other buffers, the next member's first."""
    turn = [buffers[(index + i) % len(buffers)] for i in range(len(buffers))]
    part = part_of(turn[0].numel(), index, len(buffers))
    for at in range(part.start, part.stop, _PIECE):
        piece = slice(at, min(at + _PIECE, part.stop))
        total, *others = (buffer[piece] for buffer in turn)
        for other in others:
            total.add_(other)
        yield total, others


class SharedBuffers:
    """Buffers that every member of a group has, and sees of all others."""

    def __init__(self, pg: dist.ProcessGroup) -> None:
        self._pg = pg
        self._by_address: dict[int, tuple[Tensor, ...]] = {}

    def make(self, numel: int, like: Tensor) -> Tensor | None:
        """This member's buffer, zeros; None where members cannot see each other's. Every member calls it, or it
        hangs."""
        if is_apart(like.device) or (buffers := mapped(self._pg, numel, like.dtype)) is None:
            return None
        mine = buffers[self._pg.rank()]
        self._by_address[mine.data_ptr()] = buffers
        return mine

    def around(self, x: Tensor) -> tuple[Tensor, ...]:
        """Everybody's buffers, in order, if x is the whole of this member's own; else none."""
        buffers = self._by_address.get(x.data_ptr(), ())
        return buffers if buffers and buffers[0].numel() == x.numel() else ()


class MemoryAlgorithm(EngineAlgorithm):
    """Sums of whole buffers by a meeting; what is large passes through memory, and what is small is sent."""

    def __init__(self, member: Collective, pg: dist.ProcessGroup) -> None:
        super().__init__(member, pg)
        self._buffers, self._room, self._lending = SharedBuffers(pg), SharedRoom(pg), Lending(pg)

    def near(self, device: torch.device) -> bool:
        return not is_apart(device)

    def buffer(self, numel: int, like: Tensor) -> Tensor:
        mine = self._buffers.make(numel, like)
        return super().buffer(numel, like) if mine is None else mine

    def holds(self, x: Tensor) -> bool:
        """Whether x is the whole of such a buffer."""
        return bool(self._buffers.around(x))

    def lend(self, op: str, numel: int, like: Tensor) -> Tensor:
        enough = self.near(like.device) and numel * like.element_size() >= LENT
        lent = self._lending.lend(op, numel, like) if enough else None
        return super().lend(op, numel, like) if lent is None else lent

    def lends(self, op: str, x: Tensor) -> bool:
        return (self._lending.around(x) if op == "all_gather" else self._lending.of(x)) is not None

    def sends(self, op: str, x: Tensor, root: int = 0) -> int:
        if op == "all_reduce" and self.holds(x) and self._is_small(x):
            return x.nbytes * (self.pg.size() - 1)
        return super().sends(op, x, root)

    def _is_small(self, x: Tensor) -> bool:
        return x.nbytes * (self.pg.size() - 1) <= SMALL

    def all_reduce(self, x: Tensor, op: Any) -> Pending:
        if op == dist.ReduceOp.SUM and self.holds(x):
            if self._is_small(x):
                return start_small_sum(x, op, self.pg)  # one round of messages, where a meeting takes two
            return BufferSum(self.pg, self._buffers.around(x), self.pg.rank(), agreed(self.pg))
        if op in _OPS and passes("all_reduce", x):
            return self._room.all_reduce(x, op)
        return super().all_reduce(x, op)

    def all_gather(self, out: Tensor, part: Tensor, later: bool = False) -> Pending:
        if (loan := self._lending.of(out)) is not None:
            mine = out.view(-1).chunk(self.pg.size())[self.pg.rank()]
            if mine.data_ptr() != part.data_ptr():
                mine.copy_(part.view(-1))
            return self._lending.meet(loan)
        if passes("all_gather", part):
            return self._room.all_gather(out, part)
        return super().all_gather(out, part, later)

    def exchange(self, out: Tensor, x: Tensor) -> Pending:
        return self._room.exchange(out, x) if passes("all_to_all", x) else super().exchange(out, x)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        if (loan := self._lending.of(x)) is not None:
            self._lending.reduce_scatter(out, loan)
        elif passes("reduce_scatter", x):
            self._room.reduce_scatter(out, x).wait()
        else:
            super().reduce_scatter(out, x)


def sees_all(pg: dist.ProcessGroup) -> bool:
    """Whether all members are on one host and see each other's memory. Every member of the group calls it, or it
    hangs."""
    return between_cpus(pg) and mapped(pg, 1, torch.uint8) is not None
