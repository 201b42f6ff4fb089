"""The collectives of a run, call by call, from the lines of its ranks: who was late, who waited, what moved.

Of one call on several ranks: a rank's *waiting* is when the last one arrived, less when it arrived itself; the *moving*
is from then until the call was over.

    run = collect(folder)
    for step in steps(run.ranks):
        for call in step.meetings():
            print(call.axis, call.op, call.last, call.waiting, call.moving)
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from unisono.report.collect import RankFacts, Record
from unisono.spec.words import is_number

_AXES = ("pp", "dp", "shard", "cp", "tp")
_OVER: Mapping[str, tuple[str, ...]] = {
    "world": _AXES, "replica": ("pp", "shard", "cp", "tp"), "data": ("dp", "shard"),
    "ep": ("shard", "cp", "tp"), "holders": ("shard", "cp", "tp"),
}  # fmt: skip
"""Axes over which the ranks of a group differ, where its name is not that of one, or of several joined by `+`."""
_AT_ONCE = 50e-6  # seconds: what is over sooner was over before it was waited for
ALONE = frozenset({"recv", "send"})
"""Operations of two ranks, of which each knows its own end."""


@dataclass(frozen=True, slots=True)
class CallRow:
    """One call as one rank saw it. nbytes: that the rank sent. arrived, wanted, done: seconds since the rank's step
    began: when it was ready, when it had nothing to do but wait, when it saw that all was over; an arrival below 0 is
    of a step before. number: of the calls of its axis and operation in the step."""

    axis: str
    op: str
    nbytes: int
    phase: str
    module: str
    arrived: float
    done: float
    wanted: float
    number: int

    @property
    def exposed(self) -> float:
        """Seconds in which the rank did nothing else."""
        return self.done - self.wanted


@dataclass(frozen=True, slots=True)
class RankStep:
    """One step of one rank. start: Unix time in seconds, on the clock of rank 0's host. seconds: by part of the step.
    left_out: how many calls have no row. modules: seconds of their own in (forward, backward), where they were timed.
    error_s: what `start` may be wrong by, between hosts; 0 where nothing was taken out."""

    rank: int
    step: int
    start: float
    seconds: Mapping[str, float]
    calls: tuple[CallRow, ...] = ()
    left_out: int = 0
    modules: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    error_s: float = 0.0

    @property
    def wall(self) -> float:
        """Seconds that the step took on this rank."""
        return sum(value for part, value in self.seconds.items() if part != "comm_hidden")

    @property
    def blocked(self) -> float:
        """Seconds in which the rank waited for others."""
        return self.seconds.get("comm_exposed", 0.0) + self.seconds.get("wait", 0.0)


@dataclass(frozen=True)
class SharedCall:
    """One call on all ranks that have a row of it. arrived: by rank, seconds since the step began on the first rank.
    done: the same, of the first rank that saw it over. is_timed: whether that rank did nothing but wait then; else the
    call was over sooner, beside other work."""

    step: int
    axis: str
    op: str
    nbytes: int
    phase: str
    module: str
    arrived: Mapping[int, float]
    done: float
    exposed: Mapping[int, float]
    is_timed: bool = True

    @cached_property
    def last(self) -> int:
        """The rank for which the others waited."""
        return max(self.arrived, key=lambda rank: self.arrived[rank])

    @cached_property
    def waiting(self) -> Mapping[int, float]:
        """Seconds that each rank waited for the last one."""
        latest = self.arrived[self.last]
        return {rank: latest - at for rank, at in self.arrived.items()}

    @property
    def moving(self) -> float:
        """Seconds from when all were there until it was over."""
        return max(0.0, self.done - self.arrived[self.last])


@dataclass(frozen=True)
class StepCalls:
    """One step on all ranks that have written it down. places: coordinates of each rank."""

    step: int
    ranks: Mapping[int, RankStep]
    places: Mapping[int, Mapping[str, int]]

    @property
    def seconds(self) -> float:
        """Of the step: of the rank that took longest."""
        return max(rank.wall for rank in self.ranks.values())

    @cached_property
    def start(self) -> float:
        """When it began on the first rank, in Unix time."""
        return min(rank.start for rank in self.ranks.values())

    @cached_property
    def meetings(self) -> tuple[SharedCall, ...]:
        """Its calls on several ranks, in the order in which the last one arrived; without messages from one to one."""
        by_call: dict[tuple[Any, ...], list[tuple[int, CallRow]]] = {}
        for rank, mine in sorted(self.ranks.items()):
            for row in mine.calls:
                if row.op not in ALONE:
                    key = row.axis, row.op, row.number, group_of(row.axis, self.places.get(rank, {}))
                    by_call.setdefault(key, []).append((rank, row))
        met = [self._met(rows) for rows in by_call.values() if len(rows) > 1]
        return tuple(sorted(met, key=lambda call: call.arrived[call.last]))

    def _met(self, rows: Sequence[tuple[int, CallRow]]) -> SharedCall:
        shift = {rank: self.ranks[rank].start - self.start for rank, _ in rows}
        first = rows[0][1]
        sees, seen = min(rows, key=lambda pair: pair[1].done + shift[pair[0]])
        return SharedCall(
            self.step, first.axis, first.op, max(row.nbytes for _, row in rows), first.phase, first.module,
            {rank: row.arrived + shift[rank] for rank, row in rows},
            seen.done + shift[sees],
            {rank: row.exposed for rank, row in rows},
            seen.exposed > _AT_ONCE,
        )  # fmt: skip

    @cached_property
    def waiting(self) -> Mapping[int, float]:
        """Seconds that each rank waited for others in its calls. A wait that went beside computing is none. Where some
        calls have no row, what its own times say, in which moving is counted as well."""
        if not self.meetings or any(rank.left_out for rank in self.ranks.values()):
            return {rank: mine.blocked for rank, mine in self.ranks.items()}
        sums = dict.fromkeys(self.ranks, 0.0)
        for call in self.meetings:
            for rank, seconds in call.waiting.items():
                sums[rank] += min(seconds, call.exposed[rank])
        for rank, mine in self.ranks.items():  # messages: all of it was waited for
            sums[rank] += sum(row.exposed for row in mine.calls if row.op in ALONE)
        return sums

    @cached_property
    def lateness(self) -> Mapping[int, float]:
        """Seconds by which each rank was later than the median at the call of this step at which ranks were furthest
        apart; 0 where nothing is known."""
        none = dict.fromkeys(self.ranks, 0.0)
        if not self.meetings:
            return none
        apart = max(self.meetings, key=lambda call: max(call.waiting.values()))
        middle = statistics.median(apart.arrived.values())
        return none | {rank: at - middle for rank, at in apart.arrived.items()}


def steps(ranks: Iterable[RankFacts], last: int | None = None) -> list[StepCalls]:
    """The steps that ranks have written down with their calls, in order. last: so many at the end, where a long run
    would take long to look at."""
    places: dict[int, Mapping[str, int]] = {}
    by_step: dict[int, dict[int, RankStep]] = {}
    for each in ranks:
        places[each.rank] = each.coords
        for line in each.steps[-last:] if last else each.steps:
            if (mine := rank_step(each.rank, line)) is not None:
                by_step.setdefault(mine.step, {})[each.rank] = mine
    return [StepCalls(step, by_step[step], places) for step in sorted(by_step)]


def rank_step(rank: int, line: Record) -> RankStep | None:
    """One line of `events/rank*.jsonl`; None where it is no step with a start. Damaged rows are left out."""
    times, start, step = line.get("time"), _number(line.get("start")), line.get("step")
    if start is None or not isinstance(times, dict) or not isinstance(step, int):
        return None
    said, timed, clock = line.get("calls"), line.get("modules"), line.get("clock")
    error_us = _number(clock.get("error_us")) if isinstance(clock, dict) else None
    left_out = line.get("calls_left_out")
    return RankStep(
        rank,
        step,
        start,
        {str(part): float(value) for part, value in times.items() if is_number(value)},
        tuple(row for each in (said if isinstance(said, list) else ()) if (row := _row(each)) is not None),
        left_out if isinstance(left_out, int) else 0,
        {
            str(name): (float(pair[0]), float(pair[1]))
            for name, pair in (timed.items() if isinstance(timed, dict) else ())
            if isinstance(pair, list) and len(pair) == 2 and all(map(is_number, pair))
        },
        (error_us or 0.0) * 1e-6,
    )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and is_number(value) else None


def _row(row: object) -> CallRow | None:
    """A row of 7 is one without `wanted` and `number`: then all of it was waited for, and it is the only one."""
    if not isinstance(row, list) or len(row) < 7 or not all(isinstance(row[i], str) for i in (0, 1, 3, 4)):
        return None
    wanted, number = (*row[7:9], row[5], 0)[:2] if len(row) == 7 else row[7:9]
    if not all(map(is_number, (row[2], row[5], row[6], wanted, number))):
        return None
    return CallRow(
        row[0], row[1], int(row[2]), row[3], row[4], float(row[5]), float(row[6]), float(wanted), int(number)
    )


def group_of(axis: str, place: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """What the ranks of a group over `axis` have in common, of which this place is one's: its coordinates on all other
    axes."""
    over = _OVER.get(axis, tuple(axis.split("+")))
    return tuple(sorted((name, at) for name, at in place.items() if name not in over))
