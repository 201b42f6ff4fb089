"""Collectives as programs: which rank sends which part of its buffer to whom, round by round; as plain data.

A program is played over send and receive (`comm.rounds`), checked, priced and drawn (the files beside this one). What
is simulated is what runs. An algorithm is one file with `program(op, size, root, pieces)`.

Every rank has a buffer of `chunks` chunks. Moves of one round happen side by side: what leaves is what was there when
the round began. A rank goes on to its next round when its own moves of this one are over; nobody waits for all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

OPS = (
    "broadcast",
    "scatter",
    "gather",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
)
ROOTED = ("broadcast", "scatter", "gather", "reduce")


@dataclass(frozen=True, slots=True)
class Move:
    """Chunks of one rank's buffer go to the same places of another's. adds: they are reduced into what is there; else
    they take its place."""

    source: int
    to: int
    chunks: tuple[int, ...]
    adds: bool = False


Rounds = tuple[tuple[Move, ...], ...]


@dataclass(frozen=True)
class Program:
    """One operation of `size` ranks as rounds of moves.

    Block i of the whole vector, the i-th of `size` equal runs of chunks, is rank i's in what is scattered or gathered.
    In an all-to-all, chunk i · size + j is what rank i has for rank j. root: of a rooted operation.
    """

    op: str
    size: int
    chunks: int
    rounds: Rounds
    root: int = 0

    def extent(self, chunk: int, numel: int) -> tuple[int, int]:
        """Where a chunk begins and ends in a whole vector of `numel` elements: all that is gathered, scattered, reduced
        or broadcast. In an all-to-all, `numel` is what one rank has for all, and ranks' vectors lie one after the
        other."""
        total = numel * self.size if self.op == "all_to_all" else numel
        return total * chunk // self.chunks, total * (chunk + 1) // self.chunks

    def sent(self, rank: int, numel: int) -> int:
        """Elements that a rank sends."""
        moves = (move for turn in self.rounds for move in turn if move.source == rank)
        extents = (self.extent(chunk, numel) for move in moves for chunk in move.chunks)
        return sum(stop - start for start, stop in extents)

    def most(self, numel: int) -> int:
        """Elements that the busiest rank sends."""
        counts = [0] * self.size
        lengths = [stop - start for start, stop in (self.extent(i, numel) for i in range(self.chunks))]
        for move in chain.from_iterable(self.rounds):
            counts[move.source] += sum(lengths[chunk] for chunk in move.chunks)
        return max(counts)


def held_at_first(program: Program, rank: int) -> range:
    """Chunks that a rank holds before the first round; each is its own contribution alone."""
    each, size = program.chunks // program.size, program.size
    if program.op in ("broadcast", "scatter"):
        return range(program.chunks) if rank == program.root else range(0)
    if program.op in ("gather", "all_gather"):
        return range(rank * each, (rank + 1) * each)
    if program.op == "all_to_all":
        return range(rank * size, (rank + 1) * size)
    return range(program.chunks)


def owed_at_last(program: Program, rank: int) -> dict[int, frozenset[int]]:
    """Chunks that a rank must hold after the last round, each with the ranks whose contributions are in it."""
    each, size, op = program.chunks // program.size, program.size, program.op
    chunks = range(rank * each, (rank + 1) * each)
    everybody = frozenset(range(size))
    if op == "broadcast":
        return dict.fromkeys(range(program.chunks), frozenset({program.root}))
    if op == "scatter":
        return dict.fromkeys(chunks, frozenset({program.root}))
    if op == "all_to_all":
        return {i * size + rank: frozenset({i}) for i in range(size)}
    if op == "reduce_scatter":
        return dict.fromkeys(chunks, everybody)
    if op in ("gather", "reduce") and rank != program.root:
        return {}
    if op in ("gather", "all_gather"):
        return {chunk: frozenset({chunk // each}) for chunk in range(program.chunks)}
    return dict.fromkeys(range(program.chunks), everybody)


def backwards(rounds: Rounds) -> Rounds:
    """The moves in opposite order and direction, as copies. What brings sums to their owners then brings them back to
    everybody: a reduce becomes a broadcast, a gather a scatter, a reduce-scatter an all-gather."""
    return tuple(tuple(Move(move.to, move.source, move.chunks) for move in turn) for turn in rounds[::-1])


def beside(several: Sequence[Rounds]) -> Rounds:
    """The first rounds of all at once, then their second ones, and so on."""
    return tuple(tuple(chain.from_iterable(turns)) for turns in zip_longest(*several, fillvalue=()))


def among(rounds: Rounds, ranks: Sequence[int], chunks: Sequence[Sequence[int]]) -> Rounds:
    """The same moves between these ranks: for rank i of the rounds rank `ranks[i]`, for chunk c all of `chunks[c]`."""
    return tuple(
        tuple(
            Move(
                ranks[move.source],
                ranks[move.to],
                tuple(part for chunk in move.chunks for part in chunks[chunk]),
                move.adds,
            )
            for move in turn
        )
        for turn in rounds
    )


Inward = Callable[[int], Rounds]


def completed(op: str, size: int, inward: Mapping[str, Inward]) -> Rounds:
    """Rounds of any operation, towards root 0, on `size` chunks (an all-to-all: size²), from those that bring together.

    inward: `reduce`, `gather`, `reduce_scatter` and `all_to_all` of so many ranks; `all_reduce` too where it is not a
    reduce-scatter and an all-gather.
    """
    if op in inward:
        return inward[op](size)
    if op == "all_reduce":
        inner = inward["reduce_scatter"](size)
        return inner + backwards(inner)
    return backwards(
        inward[{"broadcast": "reduce", "scatter": "gather", "all_gather": "reduce_scatter"}[op]](size)
    )


def placed(op: str, size: int, rounds: Rounds, root: int, place: Sequence[int] | None = None) -> Program:
    """A program of rounds that were made for root 0 and blocks of one chunk. place: the rank that each of those stands
    for, `place[0]` being the root; by itself, they are counted on from the root."""
    chunks = size * size if op == "all_to_all" else size
    if op in ROOTED and root:
        where = place or [(root + i) % size for i in range(size)]
        rounds = among(rounds, where, [(rank,) for rank in where])
    return Program(op, size, chunks, tuple(turn for turn in rounds if turn), root)


@dataclass(frozen=True, slots=True)
class Message:
    """One end of a move, as lengths of a vector: `runs`, [start, stop) each, one after the other."""

    peer: int
    runs: tuple[tuple[int, int], ...]
    adds: bool = False

    @property
    def numel(self) -> int:
        return sum(stop - start for start, stop in self.runs)


@dataclass(frozen=True, slots=True)
class RankTurn:
    """What one rank does in one round."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


def row(program: Program, rank: int, numel: int, longest: int = 0) -> tuple[RankTurn, ...]:
    """What a rank sends and receives for a whole vector of `numel` elements, round by round, without empty messages.
    longest: elements of one message, so that the receiver of a longer one can begin to add; 0: as many as there are."""
    turns = []
    for moves in program.rounds:
        sends, receives = [], []
        for move in moves:
            if rank in (move.source, move.to):
                ours, peer = (sends, move.to) if rank == move.source else (receives, move.source)
                runs = _runs(program, move.chunks, numel)
                ours += [Message(peer, part, move.adds) for part in _parts(runs, longest)]
        if sends or receives:
            turns.append(RankTurn(tuple(sends), tuple(receives)))
    return tuple(turns)


def _runs(program: Program, chunks: Sequence[int], numel: int) -> list[tuple[int, int]]:
    """Where these chunks lie; neighbours as one, but for an all-to-all, whose chunks lie apart."""
    runs: list[tuple[int, int]] = []
    for start, stop in (program.extent(chunk, numel) for chunk in chunks):
        if runs and runs[-1][1] == start and program.op != "all_to_all":
            runs[-1] = (runs[-1][0], stop)
        elif stop > start:
            runs.append((start, stop))
    return [(start, stop) for start, stop in runs if stop > start]


def _parts(runs: list[tuple[int, int]], longest: int) -> list[tuple[tuple[int, int], ...]]:
    if len(runs) == 1 and longest:
        start, stop = runs[0]
        return [((at, min(at + longest, stop)),) for at in range(start, stop, longest)]
    return [tuple(runs)] if runs else []
