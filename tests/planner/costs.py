"""What a timetable costs a whole rank, and zero-bubble orders made for given costs (Qi et al., 2024, arXiv 2401.10241).

Runs do not know their costs beforehand and play the paper's order by hand, which is also the best one found here for
equal costs. Orders for other costs are what the paper's figures are made with.
"""

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from unisono.programs.pipeline import Action, Kind, Placed, Timetable, play_costs
from unisono_contrib.programs.zero_bubble import handcrafted


@dataclass(frozen=True, slots=True)
class Costs:
    """Times of one rank's share of the model for one micro-batch: F, B towards the input, W, and of a message."""

    forward: float = 1.0
    backward: float = 1.0
    weight: float = 1.0
    send: float = 0.0

    @property
    def whole(self) -> float:
        return self.forward + self.backward + self.weight


def played(timetable: Timetable, costs: Costs, together: float | None = None) -> list[Placed]:
    """`play_costs` with a rank's costs shared evenly by its stages; B and W as one where the timetable has no W.

    The two copies of DualPipe are whole ones: each stage costs what a rank's share does.
    """
    each = timetable.length / len(timetable.rows)
    backward = costs.backward if timetable.splits_backward else costs.backward + costs.weight
    return play_costs(
        timetable, costs.forward / each, backward / each, costs.send, costs.weight / each, together
    )


def slowest(placed: Sequence[Placed]) -> float:
    """The longest time between a row's own first start and last stop.

    That is what a step costs where no rank waits for another to update its weights (the paper's validation after the
    update): a rank that starts later may end later too.
    """
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for row, _, start, stop in placed:
        if start < first.get(row, math.inf):
            first[row] = start
        if stop > last.get(row, -math.inf):
            last[row] = stop
    return max((last[row] - first[row] for row in first), default=0.0)


def fitted(ranks: int, micros: int, depth: int, costs: Costs, kept: float = 1.0) -> Timetable:
    """The best of a few timetables that hold at most depth x ranks micro-batches: the paper's heuristic, in our words.

    `kept` is the part of a micro-batch's activations that W still needs after B; 1 counts them until W.
    """
    ramps = ([depth * (ranks - 1 - s) + 1 for s in range(ranks)], [depth * ranks] * ranks)
    pattern = handcrafted(ranks, micros, depth)
    tried = [
        _greedy(micros, costs, depth * ranks, ahead, patient, kept)
        for ahead, patient in itertools.product(ramps, (True, False))
    ]
    span, best = min(tried, key=itemgetter(0))
    if slowest(played(pattern, costs)) <= span:
        return pattern
    rows = tuple(tuple(Action(kind, rank, micro) for kind, micro in row) for rank, row in enumerate(best))
    return Timetable(rows, tuple(range(ranks)), micros)


def _greedy(
    micros: int, costs: Costs, limit: int, ahead: Sequence[int], patient: bool, kept: float
) -> tuple[float, list[list[tuple[Kind, int]]]]:
    """(what `slowest` of it is, each rank's computations) where a rank takes B if it is there, else F if memory allows,
    else W if that delays neither.

    limit: what a rank holds at most. ahead: how many forwards each may be ahead of its backwards. A patient rank waits
    for a B or F that will come within the time of a W; an impatient one begins the W.
    """
    ranks = len(ahead)
    rows: list[list[tuple[Kind, int]]] = [[] for _ in ahead]
    f, b, w = ([0] * ranks for _ in range(3))
    begin, free = [math.inf] * ranks, [0.0] * ranks
    # When the input of a computation is there: every F's at stage 0 from the beginning.
    forwards = [[math.inf if rank else 0.0] * micros for rank in range(ranks)]
    backwards = [[math.inf] * micros for _ in ahead]
    wakes = [(0.0, rank) for rank in range(ranks)]
    while wakes:
        now, rank = heapq.heappop(wakes)
        if now < free[rank]:
            continue
        held, owed = f[rank] - b[rank], b[rank] - w[rank]
        backward = backwards[rank][b[rank]] if held else math.inf
        room = held + kept * owed + 1 <= limit + 1e-9 and held < ahead[rank]
        forward = forwards[rank][f[rank]] if room and f[rank] < micros else math.inf
        soonest = backward if backward < forward else forward
        if backward <= now:
            kind, done, cost, to, there = "B", b, costs.backward, rank - 1, backwards
        elif forward <= now:
            kind, done, cost, to, there = "F", f, costs.forward, rank + 1, forwards
        elif owed and (not patient or soonest >= now + costs.weight):
            kind, done, cost, to, there = "W", w, costs.weight, -1, backwards
        else:
            if soonest < math.inf:
                heapq.heappush(wakes, (soonest, rank))
            continue
        micro, stop = done[rank], now + cost
        done[rank], free[rank] = micro + 1, stop
        if now < begin[rank]:
            begin[rank] = now
        rows[rank].append((kind, micro))
        heapq.heappush(wakes, (stop, rank))
        if to == ranks:
            backwards[rank][micro] = stop
        elif to >= 0:
            there[to][micro] = stop + costs.send
            heapq.heappush(wakes, (max(stop + costs.send, free[to]), to))
    return max(stop - start for start, stop in zip(begin, free, strict=True)), rows
