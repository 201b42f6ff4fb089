"""Which rank computes the step of which matrix: `train.step.owners` plays it, and the planner prices it.

Matrices are assigned by cost, the dearest first, each to the rank that has least to do (Graham, "Bounds on
multiprocessing timing anomalies", 1969).
"""

from collections.abc import Sequence


def assign(costs: Sequence[float], ranks: int) -> list[int]:
    """The owner of each matrix, by its cost: `assign([8, 1, 1, 6], 2)` is [0, 1, 0, 1]."""
    load, owners = [0.0] * ranks, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[i] = min(range(ranks), key=lambda rank: load[rank])
        load[owners[i]] += costs[i]
    return owners
