"""Stages of about equal cost: who cuts a model at run time and who prices the cut ask here."""

from collections.abc import Sequence
from itertools import pairwise
from math import inf


def balance(
    costs: Sequence[float],
    first: float,
    last: float,
    stages: int,
    *,
    speeds: Sequence[float] = (),
    beside: Sequence[float] = (),
    rooms: Sequence[float] = (),
) -> list[range]:
    """Consecutive blocks per stage so that the dearest stage is as cheap as can be; `first` and `last` are what
    stem and head add to the outer stages. Every stage gets at least one block.

    speeds: of each stage, by which its costs are divided; all the same where not given. beside: what each stage has
    to do beside its blocks. rooms: blocks that each has memory for. Raises ValueError if there are fewer blocks than
    stages, or more than there is room for.
    """
    n = len(costs)
    if stages > n:
        raise ValueError(f"{n} blocks cannot make {stages} stages")
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)

    def price(stage: int, lo: int, hi: int) -> float:
        if rooms and hi - lo > rooms[stage]:
            return inf
        cost = total[hi] - total[lo] + first * (lo == 0) + last * (hi == n)
        if beside:
            cost += beside[stage]
        return cost / speeds[stage] if speeds else cost

    best = {(0, 0): (0.0, 0)}  # (stages made, blocks used) → (dearest so far, where the last stage began)
    for count in range(1, stages + 1):
        for hi in range(count, n - (stages - count) + 1):
            # Of equally good cuts the one whose last stage is shortest. A longer one is never cheaper itself.
            best_price, began = inf, hi - 1
            for lo in range(hi - 1, count - 2, -1):
                price_here = price(count - 1, lo, hi)
                if price_here >= best_price:
                    break
                whole = max(best.get((count - 1, lo), (inf, 0))[0], price_here)
                if whole < best_price:
                    best_price, began = whole, lo
            best[count, hi] = best_price, began
    if best[stages, n][0] == inf:
        raise ValueError(f"{n} blocks are more than {stages} stages have room for")
    edges = [n]
    for count in range(stages, 0, -1):
        edges.append(best[count, edges[-1]][1])
    edges.reverse()
    return [range(lo, hi) for lo, hi in pairwise(edges)]
