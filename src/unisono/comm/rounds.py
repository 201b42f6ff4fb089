"""Programs of `programs.collectives` played by one rank over the sends and receives of a process group.

Receives stand one round ahead: those of the next round are posted before this round's sends (why:
`collectives.messages`). What is reduced comes into room of its own and is added in place; what is copied comes to
where it belongs, unless that is still in use. Long messages come in pieces, so that one is added while the next is
on its way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.comm.algorithm import Algorithm, Collective, Done, Pending
from unisono.comm.tags import PROGRAMS
from unisono.programs.collectives import Message, Program, RankTurn, row

PIECE = 1 << 20
"""Bytes of one message at most."""
_CUT = 1 << 18  # bytes of a piece that ranks pass on while the next comes
_PIECES = 16

Run = tuple[int, int]
Into = Callable[[Tensor, Tensor], object]


def into(op: Any) -> Into:
    """What reduces a second tensor into a first by torch's ReduceOp; AVG adds up, the division is the caller's. Raises
    ValueError for what is not reduced pair by pair here."""
    known: list[tuple[Any, Into]] = [
        (dist.ReduceOp.SUM, lambda x, y: x.add_(y)),
        (dist.ReduceOp.AVG, lambda x, y: x.add_(y)),
        (dist.ReduceOp.PRODUCT, lambda x, y: x.mul_(y)),
        (dist.ReduceOp.MAX, lambda x, y: torch.maximum(x, y, out=x)),
        (dist.ReduceOp.MIN, lambda x, y: torch.minimum(x, y, out=x)),
    ]
    for name, way in known:
        if op == name:
            return way
    raise ValueError(f"programs of messages do not reduce by {op}")


class VectorStore(Protocol):
    """Where the elements of a program's whole vector lie on this rank."""

    def view(self, run: Run) -> Tensor:
        """The elements [start, stop), flat."""
        ...


@dataclass(frozen=True, slots=True)
class VectorWindow:
    """A stretch of the whole vector that begins with its element `start`."""

    x: Tensor
    start: int = 0

    def view(self, run: Run) -> Tensor:
        return self.x[run[0] - self.start : run[1] - self.start]


@dataclass(frozen=True, slots=True)
class OwnApart:
    """A vector that stays as it is, but for the elements from `start` on, which are those of `out`."""

    x: Tensor
    out: Tensor
    start: int

    def view(self, run: Run) -> Tensor:
        if self.start <= run[0] and run[1] <= self.start + len(self.out):
            return VectorWindow(self.out, self.start).view(run)
        return VectorWindow(self.x).view(run)


class Crossed:
    """The chunks of an all-to-all: those for others in x, those from others in out, those on their way in room of
    their own."""

    def __init__(self, x: Tensor, out: Tensor, index: int, size: int) -> None:
        self._x, self._out, self._index, self._size = x, out, index, size
        self._passing: dict[int, Tensor] = {}
        self._of(out, index).copy_(self._of(x, index))

    def _of(self, x: Tensor, part: int) -> Tensor:
        each = x.numel() // self._size
        return x[part * each : (part + 1) * each]

    def view(self, run: Run) -> Tensor:
        source, to = divmod(run[0] * self._size // self._x.numel(), self._size)
        if to == self._index:
            return self._of(self._out, source)
        if source == self._index:
            return self._of(self._x, to)
        return self._passing.setdefault(run[0], self._x.new_empty(run[1] - run[0]))


@dataclass(slots=True)
class _Posted:
    """A receive under way. room: where it comes, if that is not its place."""

    message: Message
    work: dist.Work
    room: Tensor | None


class Playing:
    """A program under way on this rank; it begins at once, and later rounds are played by whoever waits.

    Programs of one group end in the order in which they began, whichever is waited for: so ranks that wait in different
    orders do not wait for each other.
    """

    def __init__(
        self,
        turns: Sequence[RankTurn],
        store: VectorStore,
        pg: dist.ProcessGroup,
        reduces: Into,
        tag: int,
        over: Callable[[], object] = lambda: None,
        before: "Playing | None" = None,
    ) -> None:
        """over(): called once, when the last round is. before: the program that began before this one."""
        self._turns, self._store, self._pg, self._reduces, self._tag = turns, store, pg, reduces, tag
        self._over, self._at, self._before = over, 0, before
        self._going: list[tuple[Message, dist.Work, Tensor]] = []
        self._coming = self._post(0)
        self._ahead = self._post(1)
        self._send(0)

    def wait(self) -> None:
        """Returns when this rank has what the operation gives it. Raises what the process group raises where a
        member is gone or late."""
        if self._before is not None:
            self._before.wait()
            self._before = None
        with torch.no_grad():
            while self._at < len(self._turns):
                for posted in self._coming:
                    posted.work.wait()
                    self._arrived(posted)
                self._at += 1
                self._coming, self._ahead = self._ahead, self._post(self._at + 1)
                self._send(self._at)
            self._sent()
            over, self._over = self._over, lambda: None
            over()
        self._turns, self._store = (), VectorWindow(torch.empty(0))  # what was moved is not kept

    def _post(self, at: int) -> list[_Posted]:
        """Receives of a round; before it, chunks that they overwrite may be in use by the one before."""
        if at >= len(self._turns):
            return []
        used = [run for message, *_ in self._going for run in message.runs]
        if at:
            before = self._turns[at - 1]
            used += [run for message in (*before.sends, *before.receives) for run in message.runs]
        posted = []
        for message in self._turns[at].receives:
            in_place = not message.adds and len(message.runs) == 1 and not _meet(message.runs, used)
            place = self._store.view(message.runs[0])
            room = None if in_place else place.new_empty(message.numel)
            work = self._pg.recv([place if room is None else room], message.peer, self._tag)
            posted.append(_Posted(message, work, room))
        return posted

    def _send(self, at: int) -> None:
        if at >= len(self._turns):
            return
        for message in self._turns[at].sends:
            parts = [self._store.view(run) for run in message.runs]
            x = parts[0] if len(parts) == 1 else torch.cat(parts)
            self._going.append((message, self._pg.send([x], message.peer, self._tag), x))

    def _arrived(self, posted: _Posted) -> None:
        """Put what came to its place, once nothing that leaves is there any more."""
        if posted.room is None:
            return
        message, at = posted.message, 0
        if any(_meet(message.runs, other.runs) for other, *_ in self._going):
            self._sent()
        for run in message.runs:
            place, part = self._store.view(run), posted.room[at : at + run[1] - run[0]]
            if message.adds:
                self._reduces(place, part)
            else:
                place.copy_(part)
            at += run[1] - run[0]

    def _sent(self) -> None:
        for _, work, _ in self._going:
            work.wait()
        self._going.clear()


def _meet(runs: Sequence[Run], others: Sequence[Run]) -> bool:
    """Whether any of these runs have an element in common."""
    return any(a < stop and start < b for a, b in runs for start, stop in others)


class ProgramAlgorithm(Algorithm):
    """Every operation as a program. program: gives it, as `ProgramCollective.program` does."""

    def __init__(self, member: Collective, pg: dist.ProcessGroup, program: Callable[..., Program]) -> None:
        super().__init__(member, pg)
        self._index, self._size, self._calls = pg.rank(), pg.size(), 0
        self._last: Playing | None = None
        self._program = lru_cache(256)(program)
        self._turns = lru_cache(256)(self._lowered)

    @property
    def rooted(self) -> Algorithm:
        return self

    def program(self, op: str, x: Tensor, root: int = 0) -> Program:
        """What is played for an operation; x as in `sends`."""
        pieces = min(_PIECES, max(1, x.nbytes // _CUT))
        return self._program(op, self._size, root, pieces)

    def sends(self, op: str, x: Tensor, root: int = 0) -> int:
        whole = x.numel() * (self._size if op in ("gather", "all_gather") else 1)
        return self.program(op, x, root).sent(self._index, whole) * x.element_size()

    def all_reduce(self, x: Tensor, op: Any) -> Pending:
        whole, average = x.view(-1), op == dist.ReduceOp.AVG
        over = partial(x.div_, self._size) if average else lambda: None
        return self._play(self.program("all_reduce", x), VectorWindow(whole), whole, op, over)

    def all_gather(self, out: Tensor, part: Tensor, later: bool = False) -> Pending:
        whole = out.view(-1)
        mine = whole.chunk(self._size)[self._index] if whole.numel() else whole
        if mine.data_ptr() != part.data_ptr():
            mine.copy_(part.view(-1))
        return self._play(self.program("all_gather", part), VectorWindow(whole), whole)

    def exchange(self, out: Tensor, x: Tensor) -> Pending:
        whole = x.view(-1)
        if not whole.numel():
            return Done()
        store = Crossed(whole, out.view(-1), self._index, self._size)
        return self._play(self.program("all_to_all", x), store, whole)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        mine, whole, program = out.view(-1), x.view(-1), self.program("reduce_scatter", x)
        start, stop = len(mine) * self._index, len(mine) * (self._index + 1)
        mine.copy_(whole[start:stop])
        turns = self._turns(program, whole.numel(), x.element_size())
        runs = (run for turn in turns for message in turn.receives for run in message.runs)
        if all(start <= run[0] and run[1] <= stop for run in runs):  # nobody adds up for others
            self._play(program, OwnApart(whole, mine, start), whole).wait()
            return
        sums = whole.clone()
        self._play(program, VectorWindow(sums), whole).wait()
        mine.copy_(sums[start:stop])

    def broadcast(self, x: Tensor, root: int) -> Pending:
        whole = x.view(-1)
        return self._play(self.program("broadcast", x, root), VectorWindow(whole), whole)

    def reduce(self, x: Tensor, root: int, op: Any) -> Pending:
        whole = x.view(-1)
        average = op == dist.ReduceOp.AVG and self._index == root
        over = partial(x.div_, self._size) if average else lambda: None
        return self._play(self.program("reduce", x, root), VectorWindow(whole), whole, op, over)

    def scatter(self, out: Tensor, x: Tensor | None, root: int) -> Pending:
        mine, each = out.view(-1), out.numel()
        program = self._program("scatter", self._size, root, 1)
        if x is not None:
            mine.copy_(x.view(-1)[each * root : each * (root + 1)])
            return self._play(program, VectorWindow(x.view(-1)), x)
        store, start = self._room(program, mine), each * self._index
        copy = partial(mine.copy_, store.view((start, start + each)))
        return self._play(program, store, mine, None, copy, each * self._size)

    def gather(self, out: Tensor | None, part: Tensor, root: int) -> Pending:
        mine, each = part.view(-1), part.numel()
        program = self._program("gather", self._size, root, 1)
        store: VectorWindow = self._room(program, mine) if out is None else VectorWindow(out.view(-1))
        if each:
            store.view((each * self._index, each * (self._index + 1))).copy_(mine)
        return self._play(program, store, mine, numel=each * self._size)

    def _room(self, program: Program, mine: Tensor) -> VectorWindow:
        """Room for this rank's part [n] of a vector [size · n], and for all that passes through it."""
        each = mine.numel()
        turns = self._turns(program, each * self._size, mine.element_size())
        runs = [run for turn in turns for message in (*turn.sends, *turn.receives) for run in message.runs]
        runs.append((each * self._index, each * (self._index + 1)))
        start, stop = min(run[0] for run in runs), max(run[1] for run in runs)
        return VectorWindow(mine.new_empty(stop - start), start)

    def _lowered(self, program: Program, numel: int, itemsize: int) -> tuple[RankTurn, ...]:
        return row(program, self._index, numel, max(1, PIECE // itemsize))

    def _play(
        self,
        program: Program,
        store: VectorStore,
        like: Tensor,
        op: Any = None,
        over: Callable[[], object] = lambda: None,
        numel: int = -1,
    ) -> Playing:
        """like: of the operation's dtype; its whole vector unless `numel` says how long that is."""
        # Every rank counts its operations alike, so messages of two that are under way at once do not mix.
        self._calls += 1
        turns = self._turns(program, like.numel() if numel < 0 else numel, like.element_size())
        reduces = into(dist.ReduceOp.SUM if op is None else op)
        with torch.no_grad():
            self._last = Playing(turns, store, self.pg, reduces, PROGRAMS.of(self._calls), over, self._last)
        return self._last
