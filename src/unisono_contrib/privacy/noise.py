"""The noise for a budget: the smallest one under which all steps of a run stay within (epsilon, delta)."""

import math
from collections.abc import Callable, Mapping, Sequence

from unisono.spec.errors import UsageError
from unisono_contrib.privacy.mechanism import SampledGaussian
from unisono_contrib.privacy.prv import prv_epsilon
from unisono_contrib.privacy.rdp import rdp_epsilon

Accountant = Callable[[Sequence[SampledGaussian], float], float]
"""(history, delta) → epsilon: `rdp_epsilon`, `prv_epsilon`."""

ACCOUNTANTS: Mapping[str, Accountant] = {"prv": prv_epsilon, "rdp": rdp_epsilon}
"""By the name that `[privacy] accountant` says."""

_LEAST, _MOST = 1e-3, 1e6


def noise_for(
    epsilon: float,
    delta: float,
    rate: float,
    steps: int,
    accountant: Accountant = prv_epsilon,
    tolerance: float = 1e-4,
) -> float:
    """The noise, over the norm bound, of each of `steps` steps; at most 2 · `tolerance` above the smallest one, and a
    multiple of it, so that machines that round otherwise agree.

    `noise_for(8.0, 1e-5, 0.04, 2000)` is 1.291. Raises UsageError C02 where no noise up to a million is enough."""
    if steps == 0 or rate == 0.0:
        return 0.0
    spent = lambda noise: accountant([SampledGaussian(noise, rate, steps)], delta)
    excess = lambda noise: math.log(max(1e-12, spent(noise)) / epsilon)
    high = 1.0
    while (over := excess(high)) > 0.0:
        high *= 2.0
        if high > _MOST:
            what = f"no noise keeps {steps} steps at rate {rate:g} within epsilon {epsilon:g} and delta {delta:g}"
            fix = "a larger epsilon, or fewer steps"
            raise UsageError(what, where="privacy.target_epsilon", fix=fix, code="C02")
    low, above, high_over = high / 2.0, excess(high / 2.0), over
    while above <= 0.0 and low > _LEAST:
        high, high_over, low = low, above, low / 2.0
        above = excess(low)
    smallest = _root(excess, (low, above), (high, high_over), tolerance / 4.0)
    noise = math.ceil(smallest / tolerance) * tolerance
    return round(noise if excess(noise) <= 0.0 else noise + tolerance, 10)


def _root(
    excess: Callable[[float], float], low: tuple[float, float], high: tuple[float, float], width: float
) -> float:
    """Where `excess` becomes at most 0 between two noises with their values, above and below it, to `width`. By false
    position (Illinois) over log(noise), in which log(epsilon) is nearly straight."""
    (a, fa), (b, fb) = low, high
    if fa <= 0.0:
        return a
    kept = 0  # +1: the last new point was the upper end, -1: the lower
    while b - a > width:
        share = min(0.98, max(0.02, fa / (fa - fb)))
        x = math.exp(math.log(a) + share * (math.log(b) - math.log(a)))
        f = excess(x)
        if abs(f) < 1e-9:
            return x
        if f > 0.0:
            a, fa, fb, kept = x, f, fb / 2.0 if kept < 0 else fb, -1
        else:
            b, fb, fa, kept = x, f, fa / 2.0 if kept > 0 else fa, 1
    return b
