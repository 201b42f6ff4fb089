"""Timetables with the weights' gradients apart, so that they can fill bubbles (Qi et al., 2024, arXiv 2401.10241).

Two hands make them: `handcrafted` shifts 1F1B's pattern by rules that fit equal costs, `automatic` plays the ranks
against given costs and lets each take what it can. Stage s is on row s. Forwards, backwards and weight gradients of a
stage each run in ascending order of micro-batches, so gradients are summed as by every other schedule.
"""

import heapq
import itertools
import math
from collections.abc import Sequence
from operator import itemgetter

from unisono.programs.pipeline import Action, Kind, Timetable
from unisono.spec.numbers import larger, smaller
from unisono_contrib.programs.pricing import Costs, played, slowest


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
        _greedy(micros, costs, depth * ranks, ahead, patient, kept)
        for ahead, patient in itertools.product(ramps, (True, False))
    ]
    span, best = min(tried, key=itemgetter(0))
    if slowest(played(pattern, costs)) <= span:
        return pattern
    rows = tuple(tuple(Action(kind, rank, micro) for kind, micro in row) for rank, row in enumerate(best))
    return Timetable(rows, tuple(range(ranks)), micros)


def bubble(depth: int, ranks: int, micros: float, forward: float, backward: float, weight: float) -> float:
    """Seconds in which a row waits between its own first start and last stop, at most. backward includes weight."""
    owed = smaller(micros, depth * ranks) - 1
    return larger(0.0, (ranks - 1) * (forward + backward - weight) - owed * spare(forward, backward, weight))


def spare(forward: float, backward: float, weight: float) -> float:
    """What of a W fills the others' waiting: it is the least of the three parts."""
    return smaller(weight, smaller(forward, backward - weight))


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
