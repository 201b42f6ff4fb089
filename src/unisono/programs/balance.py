"""Stages of about equal cost: who cuts a model at run time and who prices the cut ask here."""

from collections.abc import Sequence
from itertools import pairwise


def balance(costs: Sequence[float], first: float, last: float, stages: int) -> list[range]:
    """Consecutive blocks per stage so that the dearest stage is as cheap as can be; `first` and `last` are what
    stem and head add to the outer stages. Every stage gets at least one block.

    Raises ValueError if there are fewer blocks than stages.
    """
    n = len(costs)
    if stages > n:
        raise ValueError(f"{n} blocks cannot make {stages} stages")
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)

    def price(lo: int, hi: int) -> float:
        return total[hi] - total[lo] + first * (lo == 0) + last * (hi == n)

    best = {(0, 0): (0.0, 0)}  # (stages made, blocks used) → (dearest so far, where the last stage began)
    for made in range(1, stages + 1):
        for hi in range(made, n - (stages - made) + 1):
            options = [
                (max(best[made - 1, lo][0], price(lo, hi)), lo)
                for lo in range(made - 1, hi)
                if (made - 1, lo) in best
            ]
            best[made, hi] = min(options, key=lambda option: (option[0], -option[1]))
    edges = [n]
    for made in range(stages, 0, -1):
        edges.append(best[made, edges[-1]][1])
    edges.reverse()
    return [range(lo, hi) for lo, hi in pairwise(edges)]
