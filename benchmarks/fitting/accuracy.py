"""How right predictions are, and how well they rank: what a set of measured rows says about them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from benchmarks.fitting.calibrate import MeasuredStep, Measurement, errors, fit
from unisono.planner.error_bars import APART, techniques, trust
from unisono.planner.stack import FittedRange, Stack


@dataclass(frozen=True, slots=True)
class Summary:
    """Relative errors in per cent. rank: mean Spearman correlation inside the groups that share a question (model,
    devices, batch). regret: how much slower the plan that is predicted best is than the best, mean over the groups.
    Both are None where no group has three rows.
    """

    rows: int
    mean: float
    median: float
    p95: float
    max: float
    bias: float
    rank: float | None = None
    regret: float | None = None


def summary(rows: Sequence[MeasuredStep], wrong: Sequence[float]) -> Summary:
    """Of rows and their relative errors."""
    sizes = sorted(100.0 * abs(e) for e in wrong)
    groups: dict[str, list[tuple[float, float]]] = {}
    for row, e in zip(rows, wrong, strict=True):
        groups.setdefault(row.group, []).append((row.seconds, row.seconds * (1.0 + e)))
    large = [group for group in groups.values() if len(group) >= 3]
    return Summary(
        rows=len(rows),
        mean=sum(sizes) / len(sizes),
        median=quantile(sizes, 0.5),
        p95=quantile(sizes, 0.95),
        max=sizes[-1],
        bias=100.0 * sum(wrong) / len(wrong),
        rank=sum(map(spearman, large)) / len(large) if large else None,
        regret=100.0 * sum(map(regret, large)) / len(large) if large else None,
    )


def by_one(wrong: Sequence[float]) -> list[float]:
    """Errors of rows with prices scaled to one other row, as a user's own run does: every row by every other."""
    return [(1.0 + b) / (1.0 + a) - 1.0 for i, a in enumerate(wrong) for j, b in enumerate(wrong) if i != j]


def quantile(ascending: Sequence[float], share: float) -> float:
    """With linear interpolation between neighbours."""
    at = share * (len(ascending) - 1)
    low = int(at)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (at - low) * (ascending[high] - ascending[low])


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """Rank correlation of (measured, predicted); equal values share their mean rank."""
    first, second = _ranks([a for a, _ in pairs]), _ranks([b for _, b in pairs])
    mean = (len(pairs) - 1) / 2
    both = sum((a - mean) * (b - mean) for a, b in zip(first, second, strict=True))
    spread = (sum((a - mean) ** 2 for a in first) * sum((b - mean) ** 2 for b in second)) ** 0.5
    return both / spread if spread else 1.0


def regret(pairs: Sequence[tuple[float, float]]) -> float:
    """(measured, predicted): the share by which following the prediction is slower than the best."""
    chosen = min(pairs, key=lambda pair: pair[1])[0]
    return chosen / min(measured for measured, _ in pairs) - 1.0


def crossed(
    rows: Sequence[Measurement], stack: Stack, constants: Sequence[str], folds: int = 5
) -> list[float]:
    """Errors of each row under constants fitted to the folds that it is not in; in the rows' order."""
    order = list(range(len(rows)))
    Random(0).shuffle(order)
    wrong = [0.0] * len(rows)
    for fold in range(folds):
        held = order[fold::folds]
        rest = [rows[i] for i in order if i not in set(held)]
        made = fit(rest, stack, constants)
        for i, e in zip(held, errors([rows[i] for i in held], made), strict=True):
            wrong[i] = e
    return wrong


def sampled(
    rows: Sequence[MeasuredStep], stack: Stack, constants: Sequence[str], count: int, seed: int = 0
) -> tuple[list[MeasuredStep], list[float]]:
    """Rows that a random `count` of them was not fitted on, and their errors."""
    order = list(range(len(rows)))
    Random(seed).shuffle(order)
    made = fit([rows[i] for i in order[:count]], stack, constants)
    held = [rows[i] for i in order[count:]]
    return held, errors(held, made)


def seen(rows: Sequence[MeasuredStep]) -> FittedRange:
    """What rows have between them."""

    def span(values: Sequence[int]) -> tuple[int, int]:
        return min(values), max(values)

    return FittedRange(
        tuple(dict.fromkeys(row.cluster.device.name for row in rows)),
        span([row.plan.world for row in rows]),
        span([row.model.d_model for row in rows]),
        span([row.model.context for row in rows]),
        tuple(name for name in APART if any(name in techniques(row.plan) for row in rows)),
    )


def beyond(
    rows: Sequence[MeasuredStep],
    stack: Stack,
    constants: Sequence[str],
    inside: Callable[[MeasuredStep], bool],
) -> tuple[list[MeasuredStep], list[float], float]:
    """(rows that are not inside, their errors under constants fitted to those that are, the mean error that `trust`
    announces for them)."""
    fitted, rest = [row for row in rows if inside(row)], [row for row in rows if not inside(row)]
    made = replace(fit(fitted, stack, constants), seen=seen(fitted))
    announced = [trust(row.model, row.plan, row.cluster, made).error for row in rest]
    return rest, errors(rest, made), 100.0 * sum(announced) / len(announced)


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    at = 0
    while at < len(order):
        end = at
        while end + 1 < len(order) and values[order[end + 1]] == values[order[at]]:
            end += 1
        for i in range(at, end + 1):
            ranks[order[i]] = (at + end) / 2
        at = end + 1
    return ranks
