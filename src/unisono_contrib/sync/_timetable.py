"""When slices depart: settled once from measured times, so that all ranks issue the same sums in one order."""

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from math import inf


def timetable(
    ready: Sequence[float], seconds: Sequence[float], urgent: Sequence[int], window: float
) -> list[tuple[int, float]]:
    """(slice, slices that may be under way with it) in the order in which they depart: from a simulation of one
    backward on one link.

    ready: when each slice's gradients are there, seconds from the start of backward. seconds: that the link takes for
    it. urgent: its turn in the next forward; the least is the most urgent. window: slices that may be under way in any
    case. The link serves one slice after the other. A slice can depart when some gradient comes, since nothing else
    runs beside backward; so as many depart then as keep the link busy until the next one comes, the most urgent first.
    None is stopped on its way; those that wait are overtaken.
    """
    moments = sorted(set(ready))
    coming = sorted(range(len(ready)), key=lambda i: (ready[i], urgent[i], i))
    waiting: list[tuple[int, int]] = []
    order: list[tuple[int, float]] = []
    ends: list[float] = []  # of those that departed, ascending
    at = 0
    for now, then in zip(moments, [*moments[1:], inf], strict=True):
        while at < len(coming) and ready[coming[at]] <= now:
            heapq.heappush(waiting, (urgent[coming[at]], coming[at]))
            at += 1
        while waiting:
            under_way = len(ends) - bisect_right(ends, now)
            if under_way >= window and ends[-1] >= then:
                break
            _, chosen = heapq.heappop(waiting)
            order.append((chosen, max(window, under_way + 1)))
            ends.append(max(now, ends[-1] if ends else now) + seconds[chosen])
    return order
