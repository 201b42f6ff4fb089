"""Is one version slower than another? A test on pairs of times that were measured one right after the other. No torch.

The time of a version on a busy machine wanders by more than what one looks for, but two measurements that follow each
other wander together: what counts is the ratio of a pair. If both versions are equally fast and take turns in
beginning, each ratio is as likely above 1 as below, whatever its size. So all sign patterns of the logarithms are
equally likely, and how many of them look as bad as what was seen is the probability of a false alarm, exactly and for
any noise (Fisher's permutation test, 1935). One looks after each pair from the fifth on, and
stops at the first alarm; each look has a part of the false alarms that are allowed (Lan and DeMets, 1983).
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ALARMS = 0.03
"""Probability of calling a version slower that is not, over all rows and all looks."""
MOST, FIRST = 10, 5
"""Pairs at most, and pairs before the first look: of fewer, no pattern is rare enough."""
LATE = 3
"""The false alarms allowed until a look grow with this power of its pairs: most are kept for the last one, which can
then bear a pair that says the opposite."""
CLIP = 2.0
"""A logarithm counts as this many times the median at most: a pair that other work fell into is no better or worse."""
WORTH = 0.01
"""A difference below this share is none, however sure."""
DRIFT = 0.10
"""By how much a machine may have become slower or faster between two days: other load, clock, memory, kernel."""


@dataclass(frozen=True, slots=True)
class SpeedDifference:
    """ratio: how many times as long the new version takes as the old one, the median over pairs. low, high: where that
    median lies with a confidence of 90 % at least. slower, faster: whether that is sure. pairs: how many there are."""

    ratio: float
    low: float
    high: float
    slower: bool
    faster: bool
    pairs: int


def of_pairs(ratios: Mapping[str, Sequence[float]]) -> dict[str, SpeedDifference]:
    """What pairs of times say of each row, each new / old, in the order in which they were measured. All rows together
    raise a false alarm no more often than one would."""
    slower, faster = (_alarmed(ratios, sign) for sign in (1, -1))
    differences = {}
    for name, values in ratios.items():
        median, (low, high) = statistics.median(values), median_within(values)
        differences[name] = SpeedDifference(
            median, low, high,
            slower=name in slower and median >= 1 + WORTH,
            faster=name in faster and median <= 1 / (1 + WORTH),
            pairs=len(values),
        )  # fmt: skip
    return differences


def of_days(new: Sequence[float], old: Sequence[float]) -> SpeedDifference:
    """What times of two days say, in seconds: the ratio of the medians. The machine's drift cannot be taken out, so the
    interval is wider by it, and what lies within it is no difference."""
    ratio = statistics.median(new) / statistics.median(old)
    (new_low, new_high), (old_low, old_high) = median_within(new), median_within(old)
    low, high = new_low / old_high / (1 + DRIFT), new_high / old_low * (1 + DRIFT)
    return SpeedDifference(ratio, low, high, slower=low > 1, faster=high < 1, pairs=min(len(new), len(old)))


def median_within(values: Sequence[float]) -> tuple[float, float]:
    """The interval in which the median lies with a confidence of 90 % at least, by order alone (the sign test); of less
    than five values all of them."""
    ordered, count, cut = sorted(values), len(values), 0
    beyond = 2 / 2**count
    while beyond + 2 * math.comb(count, cut + 1) / 2**count <= 0.1:
        cut += 1
        beyond += 2 * math.comb(count, cut) / 2**count
    return ordered[cut], ordered[-1 - cut]


def _alarmed(ratios: Mapping[str, Sequence[float]], sign: int) -> set[str]:
    """Rows whose logarithms, times `sign`, are too far above 0 at the last look or at one before."""
    import numpy as np  # not for --help

    logs = sign * np.log(np.array([*ratios.values()], dtype=float))
    count = min(logs.shape[1], MOST)
    patterns = 1 - 2 * ((np.arange(2**count)[:, None] >> np.arange(count)) & 1)
    crossed = np.zeros(len(patterns), dtype=bool)  # patterns that would have been alarms
    rows: set[str] = set()
    for look in range(FIRST, count + 1):
        most = CLIP * np.median(np.abs(logs[:, :look]), axis=1, keepdims=True)
        seen = np.clip(logs[:, :look], -most, most)  # the same for every pattern, so the test stays exact
        scale = np.sqrt((seen**2).sum(1)) + np.finfo(float).tiny
        sums = patterns[:, :look] @ (
            seen.T / scale[:, None].T
        )  # a pattern's sums; the first one is what was seen
        highest = np.round(sums.max(1), 9)  # of all rows (Westfall and Young, 1993)
        allowed = int(ALARMS * (look / MOST) ** LATE * len(patterns)) - int(crossed.sum())
        least = _least(highest[~crossed], allowed)
        rows |= {name for name, value in zip(ratios, np.round(sums[0], 9), strict=True) if value >= least}
        crossed |= highest >= least
    return rows


def _least(values: Any, most: int) -> float:
    """The least of these values that at most `most` of them reach."""
    import numpy as np

    different, counts = np.unique(values, return_counts=True)
    reach = counts[::-1].cumsum()[::-1]
    fitting = different[reach <= most]
    return float(fitting[0]) if len(fitting) else math.inf
