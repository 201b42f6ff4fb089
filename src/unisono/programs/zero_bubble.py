"""Timetables with the weights' gradients apart, so that they can fill bubbles (Qi et al., 2024, arXiv 2401.10241).

Two hands make them: `handcrafted` shifts 1F1B's pattern by rules that fit equal costs, `automatic` plays the ranks
against given costs and lets each take what it can. Stage s is on row s. Forwards, backwards and weight gradients of a
stage each run in ascending order of micro-batches, so gradients are summed as by every other schedule.
"""

import heapq
import itertools
import math
from collections.abc import Sequence

from unisono.programs.pipeline import Action, Kind, Timetable
from unisono.programs.pricing import Costs, played, slowest
from unisono.spec.numbers import larger, smaller


def handcrafted(ranks: int, micros: int, depth: int) -> Timetable:
    """ZB-H1 (`depth` 1) and ZB-H2 (`depth` 2) of the paper.

    Stage s runs depth(ranks-1-s) forwards ahead of 1F1B's alternation and owes its W for depth s micro-batches: so
    every stage holds depth(ranks-1)+1 micro-batches, and the later a stage, the more W it has left to do at the end,
    while the backwards of the last micro-batches hurry to the first stage.
    """
    rows = []
    for stage in range(ranks):
        ahead, owed = min(depth * (ranks - 1 - stage), micros), depth * stage
        row = [Action("F", stage, micro) for micro in range(ahead)]
        for micro in range(micros):
            if micro + ahead < micros:
                row.append(Action("F", stage, micro + ahead))
            row.append(Action("B", stage, micro))
            if micro >= owed:
                row.append(Action("W", stage, micro - owed))
        row += [Action("W", stage, micro) for micro in range(max(0, micros - owed), micros)]
        rows.append(tuple(row))
    return Timetable(tuple(rows), tuple(range(ranks)), micros)


def automatic(ranks: int, micros: int, depth: int, costs: Costs, kept: float = 1.0) -> Timetable:
    """The best of a few timetables that hold at most depth x ranks micro-batches: the paper's heuristic, in our words.

    `kept` is the part of a micro-batch's activations that W still needs after B; 1 counts them until W.
    """
    ramps = ([depth * (ranks - 1 - s) + 1 for s in range(ranks)], [depth * ranks] * ranks)
    pattern = handcrafted(ranks, micros, depth)
    tried = [
        _Ranks(ranks, micros, costs, depth * ranks, ahead, patient, kept).run()
        for ahead, patient in itertools.product(ramps, (True, False))
    ]
    best = min(tried, key=_Ranks.span)
    return pattern if slowest(played(pattern, costs)) <= best.span() else best.timetable()


def bubble(depth: int, ranks: int, micros: float, forward: float, backward: float, weight: float) -> float:
    """Seconds in which a row waits between its own first start and last stop, at most. backward includes weight."""
    owed = smaller(micros, depth * ranks) - 1
    return larger(0.0, (ranks - 1) * (forward + backward - weight) - owed * spare(forward, backward, weight))


def spare(forward: float, backward: float, weight: float) -> float:
    """What of a W fills the others' waiting: it is the least of the three parts."""
    return smaller(weight, smaller(forward, backward - weight))


class _Ranks:
    """Ranks in time: each takes B if it is there, else F if memory allows, else W if that delays neither.

    `limit` is what a rank holds at most, `ahead` how many forwards each may be ahead of its backwards. A patient rank
    waits for a B or F that will come within the time of a W; an impatient one begins the W.
    """

    def __init__(
        self,
        ranks: int,
        micros: int,
        costs: Costs,
        limit: int,
        ahead: Sequence[int],
        patient: bool,
        kept: float,
    ) -> None:
        self.ranks, self.micros, self.costs = ranks, micros, costs
        self.limit, self.ahead, self.patient, self.kept = limit, ahead, patient, kept
        self.rows: list[list[tuple[Kind, int]]] = [[] for _ in range(ranks)]
        self.done = {kind: [0] * ranks for kind in ("F", "B", "W")}
        self.begin, self.free = [math.inf] * ranks, [0.0] * ranks
        # When the input of a computation is there: every F's at stage 0 from the beginning.
        self.here = {("F", 0, micro): 0.0 for micro in range(micros)}
        self.wakes = [(0.0, rank) for rank in range(ranks)]

    def run(self) -> "_Ranks":
        while self.wakes:
            now, rank = heapq.heappop(self.wakes)
            if now >= self.free[rank]:
                self._act(rank, now)
        return self

    def span(self) -> float:
        """As `slowest` of the timetable played, without making it."""
        return max(stop - start for start, stop in zip(self.begin, self.free, strict=True))

    def timetable(self) -> Timetable:
        rows = tuple(
            tuple(Action(kind, rank, micro) for kind, micro in row) for rank, row in enumerate(self.rows)
        )
        return Timetable(rows, tuple(range(self.ranks)), self.micros)

    def _act(self, rank: int, now: float) -> None:
        f, b, w = (self.done[kind][rank] for kind in ("F", "B", "W"))
        room = (f - b) + self.kept * (b - w) + 1 <= self.limit + 1e-9
        backward = self.here.get(("B", rank, b), math.inf) if b < f else math.inf
        forward = math.inf
        if f < self.micros and room and f - b < self.ahead[rank]:
            forward = self.here.get(("F", rank, f), math.inf)
        soonest = min(backward, forward)
        if backward <= now:
            self._take("B", rank, b, now)
        elif forward <= now:
            self._take("F", rank, f, now)
        elif w < b and (not self.patient or soonest >= now + self.costs.weight):
            self._take("W", rank, w, now)
        elif soonest < math.inf:
            heapq.heappush(self.wakes, (soonest, rank))

    def _take(self, kind: Kind, rank: int, micro: int, now: float) -> None:
        cost = {"F": self.costs.forward, "B": self.costs.backward, "W": self.costs.weight}[kind]
        stop = self.free[rank] = now + cost
        self.begin[rank] = min(self.begin[rank], now)
        self.done[kind][rank] += 1
        self.rows[rank].append((kind, micro))
        heapq.heappush(self.wakes, (stop, rank))
        if kind == "F":
            if rank + 1 < self.ranks:
                self._send("F", rank + 1, micro, stop)
            else:
                self.here["B", rank, micro] = stop
        elif kind == "B" and rank:
            self._send("B", rank - 1, micro, stop)

    def _send(self, kind: str, rank: int, micro: int, stop: float) -> None:
        arrival = self.here[kind, rank, micro] = stop + self.costs.send
        heapq.heappush(self.wakes, (max(arrival, self.free[rank]), rank))
