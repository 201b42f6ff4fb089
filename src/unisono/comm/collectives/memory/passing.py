"""Operations on any tensors through memory that all ranks of a host see: each member copies its own in, and reads what
it needs of the others'. Over loopback the same bytes would be copied four times.

What passes has room in a ring of slots, each as large as the largest piece so far. An operation takes the next slot; it
is free again when everybody has read what was in it. No message says so; the order of pieces does. Let n be a piece
that a member begins. (1) At most `AHEAD` pieces are under way, so this member has ended piece n - AHEAD. (2) A piece
ends only after all members have begun it. (3) So all others have begun n - AHEAD, and have ended piece n - 2 * AHEAD.
(4) The slot of n held piece n - `SLOTS` = n - 2 * AHEAD before, which nobody reads any more.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.comm.algorithm import Once, Pending, Several
from unisono.comm.collectives.memory.mapping import mapped, part_of
from unisono.comm.collectives.messages.live import InFlight, agreed
from unisono.comm.tags import PIECES
from unisono.comm.tree import tree_sum

AHEAD = 2  # pieces under way
SLOTS = 2 * AHEAD
PIECE = (
    32 << 20
)  # bytes of a member's tensor that pass at once: what the room of a group may grow to, by slot
_WARM = 1 << 17  # bytes that are added up at once, in the CPU's second cache

Read = Callable[[Sequence[Tensor]], None]
"""What a member does with everybody's piece, in the order of the members, once all are there."""


@dataclass
class Passing(Once):
    """A piece under way. After `wait`, this member has read what it needs of it."""

    each: Sequence[Tensor]
    there: InFlight
    read: Read

    def end(self) -> None:
        self.there.wait()
        with torch.no_grad():
            self.read(self.each)


class SharedRoom:
    """What the members of a group share. Every member makes it and calls each method, in one order, or it hangs."""

    def __init__(self, pg: dist.ProcessGroup) -> None:
        self.pg, self._begun = pg, 0
        self._slots: list[Sequence[Tensor]] = [()] * SLOTS
        self._under_way: deque[Passing] = deque()

    def all_gather(self, out: Tensor, part: Tensor) -> Pending:
        """part [n] of every member → out [size · n], in which `part` may lie at its own place."""
        index, places = self.pg.rank(), out.view(-1).chunk(self.pg.size())
        if places[index].data_ptr() != part.data_ptr():
            places[index].copy_(part.view(-1))

        def taken(piece: slice) -> Read:
            def read(each: Sequence[Tensor]) -> None:
                for i in self._others():
                    places[i][piece].copy_(each[i])

            return read

        return Several([self._pass(part.view(-1)[piece], taken(piece)) for piece in pieces(part)])

    def exchange(self, out: Tensor, x: Tensor) -> Pending:
        """x [size · n] → out [size · n]: part i is what member i has as this member's part."""
        places = out.view(self.pg.size(), -1)

        def taken(piece: slice) -> Read:
            def read(each: Sequence[Tensor]) -> None:
                for i in range(len(each)):
                    places[i, piece].copy_(each[i])

            return read

        return self._dealt(x, taken)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Pending:
        """This member's part of the sum of all x [size · n] into out [n], along the tree over the members."""

        def added(piece: slice) -> Read:
            def read(each: Sequence[Tensor]) -> None:
                into = out.view(-1)[piece]
                for warm in _warm(into):
                    into[warm].copy_(tree_sum([x[warm] for x in each]))

            return read

        return self._dealt(x, added)

    def reduce_scatter_over(
        self, out: Tensor, x: Tensor, places: Sequence[int], beyond: Callable[[Tensor, Tensor], None]
    ) -> None:
        """As reduce_scatter, of an x with a part for more than the members: into out [n] this member's part of the sum
        of theirs and others' x. places: of the parts of which this member adds up the members' own.
        beyond(out, sums): into `out` what is this member's of those `sums` [places · n] and of others'."""
        size, parts = self.pg.size(), x.view(x.numel() // out.numel(), -1)

        def added(piece: slice) -> Read:
            def read(each: Sequence[Tensor]) -> None:
                rows = [whole.view(len(parts), -1) for whole in each]
                sums = torch.stack([tree_sum([rows[i][place] for i in range(size)]) for place in places])
                beyond(out.view(-1)[piece], sums.view(-1))

            return read

        for piece in pieces(parts[0], len(parts)):
            self._pass(parts[:, piece], added(piece)).wait()

    def all_reduce(self, x: Tensor, op: Any, beyond: Callable[[Tensor], None] = lambda part: None) -> Pending:
        """Reduce x in place: a sum along the tree over the members, or the greatest or least. op: torch's ReduceOp.
        beyond: reduces this member's part over those who are not members; who waits calls it."""
        flat, index = x.view(-1), self.pg.rank()

        def reduced(piece: slice, number: int) -> Read:
            def read(each: Sequence[Tensor]) -> None:
                size, x = len(each), flat[piece]
                mine = part_of(x.numel(), index, size)
                summed = [x[mine] if i == index else each[i][mine] for i in range(size)]
                for warm in _warm(x[mine]):
                    x[mine][warm].copy_(_of([part[warm] for part in summed], op))
                beyond(x[mine])
                each[index][mine].copy_(x[mine])
                agreed(self.pg, PIECES.of(2 * number + 1)).wait()
                for i in self._others():
                    part = part_of(x.numel(), i, size)
                    x[part].copy_(each[i][part])

            return read

        works = []
        for piece in pieces(flat):
            mine = part_of(flat[piece].numel(), index, self.pg.size())
            works.append(self._pass(flat[piece], reduced(piece, self._begun), mine))
        return Several(works)

    def _dealt(self, x: Tensor, read: Callable[[slice], Read]) -> Pending:
        """x [size · n]: of everybody's, what is this member's part. read: of a piece of that part."""
        size, index = self.pg.size(), self.pg.rank()
        parts = x.view(size, -1)

        def mine(piece: slice) -> Read:
            act = read(piece)

            def of_all(each: Sequence[Tensor]) -> None:
                there = [whole.view(size, -1)[index] for whole in each]
                there[index] = parts[index, piece]
                act(there)

            return of_all

        ours = slice(index, index + 1)
        return Several([self._pass(parts[:, piece], mine(piece), ours) for piece in pieces(parts[0], size)])

    def _pass(self, x: Tensor, read: Read, mine: slice = slice(0, 0)) -> Passing:
        """Begin to pass x, of which nobody reads the rows `own` but this member, who has them."""
        if len(self._under_way) == AHEAD:
            self._under_way.popleft().wait()
        at = self._begun % SLOTS
        if not self._slots[at] or self._slots[at][0].numel() < x.nbytes:
            self._slots = self._grown(x.nbytes)
        each = [place[: x.nbytes].view(x.dtype) for place in self._slots[at]]
        place = each[self.pg.rank()].view(x.shape)
        place[: mine.start].copy_(x[: mine.start])
        place[mine.stop :].copy_(x[mine.stop :])
        passing = Passing(each, agreed(self.pg, PIECES.of(2 * self._begun)), read)
        self._begun += 1
        self._under_way.append(passing)
        return passing

    def _grown(self, nbytes: int) -> list[Sequence[Tensor]]:
        """New slots, all at once: pieces under way keep the old ones."""
        each = max(64, 1 << (nbytes - 1).bit_length())
        room = mapped(self.pg, SLOTS * each, torch.uint8)
        if room is None:
            raise RuntimeError("a member of the group sees the others' memory no more")
        return [[whole[at : at + each] for whole in room] for at in range(0, SLOTS * each, each)]

    def _others(self) -> Sequence[int]:
        """All other members, the next one first, so that not all read from one."""
        index, size = self.pg.rank(), self.pg.size()
        return [(index + i) % size for i in range(1, size)]


def pieces(x: Tensor, times: int = 1) -> list[slice]:
    """Of x's elements, what passes at once if each takes the room of `times`."""
    step = max(1, PIECE // (x.element_size() * times))
    return [slice(at, min(at + step, x.numel())) for at in range(0, x.numel(), step)]


def _warm(x: Tensor) -> list[slice]:
    step = _WARM // x.element_size()
    return [slice(at, at + step) for at in range(0, x.numel(), step)]


def _of(each: Sequence[Tensor], op: Any) -> Tensor:
    if op == dist.ReduceOp.SUM:
        return tree_sum(each)
    least = op == dist.ReduceOp.MIN
    total = each[0]
    for x in each[1:]:
        total = torch.minimum(total, x) if least else torch.maximum(total, x)
    return total
