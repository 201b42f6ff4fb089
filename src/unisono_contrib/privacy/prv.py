"""The accountant of privacy random variables: a nearly tight epsilon, by composing losses numerically.

Gopi, Lee and Wutschitz, "Numerical composition of differential privacy" (2021). The loss of one step is a random
variable. The loss of all steps is a sum of independent ones. Its distribution is made on a grid, by Fourier transforms.
"""

import math
from collections.abc import Sequence

import numpy as np

from unisono.spec.errors import UsageError
from unisono_contrib.privacy.mechanism import Floats, SampledGaussian, require_delta, without_bound
from unisono_contrib.privacy.rdp import rdp_epsilon

_erfc = np.frompyfunc(math.erfc, 1, 1)
_MOST = 1 << 25  # points of the grid, 256 MiB each time that it is held


def prv_epsilon(history: Sequence[SampledGaussian], delta: float, error: float = 0.01) -> float:
    """An epsilon such that all steps of `history` together are (epsilon, delta) differentially private. It is an upper
    bound, at most about 2 · `error` above the smallest one.

    `prv_epsilon([SampledGaussian(1.5, 0.04, 2250)], 1e-5)` is 6.779. error: of epsilon; a four-thousandth of it where
    that is more, so that large ones stay within memory. inf where a step has no noise. Raises UsageError C02 for a
    delta outside [1e-12, 1), and where the grid would not fit into memory."""
    require_delta(delta)
    if without_bound(history):
        return math.inf
    history = [step for step in history if step.reveals]
    if not history:
        return 0.0
    slack = delta / 1000.0  # of delta, for what lies outside the grid
    rough = rdp_epsilon(history, slack / 4.0)
    error = max(error, rough / 4000.0)
    losses, masses = _composed(history, rough, error, slack)
    return _epsilon_at(losses, masses, delta - slack) + error


def _composed(
    history: Sequence[SampledGaussian], rough: float, error: float, slack: float
) -> tuple[Floats, Floats]:
    """(losses [n] ascending, their probabilities [n]) of all steps together (theorem 5.5 and remark 5.6)."""
    steps = sum(step.steps for step in history)
    single = max(
        rdp_epsilon([SampledGaussian(step.noise, step.rate, 1)], max(1e-12, slack / (8.0 * steps)))
        for step in history
    )
    half_width = max(rough, single, error) + 3.0
    mesh = error / math.sqrt(steps * math.log(12.0 / slack) / 2.0)
    half = math.ceil(half_width / mesh)
    size = _quick(2 * half + 2)
    if size > _MOST:
        what = f"the loss of {steps} steps is composed on {size} points, more than {_MOST}"
        raise UsageError(what, where="steps", fix="a larger error, or the RDP accountant", code="C02")
    grid = np.arange(-(size // 2), size - size // 2) * mesh
    spectrum, shift = np.ones(size // 2 + 1, dtype=np.complex128), 0.0
    for step in history:
        masses = _masses(step, grid, mesh)
        shift += step.steps * (_mean(step, grid[0], grid[-1]) - float(grid @ masses))
        spectrum *= np.fft.rfft(np.roll(masses, -(size // 2))) ** step.steps
    masses = np.roll(np.fft.irfft(spectrum, size), size // 2)
    return grid + shift, np.maximum(masses, 0.0)


def _quick(size: int) -> int:
    """The smallest even length from `size` that a Fourier transform takes quickly: 2^a 3^b 5^c."""
    best = 1 << (size - 1).bit_length()
    for five in (1, 5, 25, 125):
        for three in (1, 3, 9, 27, 81):
            odd = five * three
            best = min(best, odd << max(1, math.ceil(math.log2(size / odd))))
    return best


def _masses(step: SampledGaussian, grid: Floats, mesh: float) -> Floats:
    """Probabilities of one step's loss, rounded to the grid, [n]; they add up to 1."""
    below = _distribution(step, np.append(grid - mesh / 2.0, grid[-1] + mesh / 2.0))
    masses = np.diff(below)
    return masses / masses.sum()


def _distribution(step: SampledGaussian, losses: Floats) -> Floats:
    """The probability that one step's loss is at most so much, [n], where the outcome is drawn with the sample
    (propositions B.1 and B.4 of the paper)."""
    q, sigma = step.rate, step.noise
    least = math.log1p(-q) if q < 1.0 else -math.inf
    inside = losses > least
    loss = losses[inside]
    # The inverse of `SampledGaussian.loss`: x = 1/2 + noise² · log((e^loss - (1 - rate)) / rate).
    x = 0.5 + sigma**2 * (loss + np.log(-np.expm1(least - loss)) - math.log(q))
    out = np.zeros_like(losses)
    out[inside] = q * _normal((x - 1.0) / sigma) + (1.0 - q) * _normal(x / sigma)
    return out


def _normal(z: Floats) -> Floats:
    """The probability that a standard normal variable is at most z, [n]."""
    return 0.5 * np.asarray(_erfc(-z / math.sqrt(2.0)), dtype=np.float64)


def _mean(step: SampledGaussian, first: float, last: float) -> float:
    """The mean of one step's loss, where it lies between two bounds. Steps add its error up, so it is integrated over
    outcomes, where the rule is exact to rounding; on the grid of losses it would not be."""
    x = step.outcomes()
    loss = step.loss(x)
    with_sample = np.exp(step.density(x) + loss) * ((loss >= first) & (loss <= last))
    return float(np.trapezoid(with_sample * loss, x) / np.trapezoid(with_sample, x))


def _epsilon_at(losses: Floats, masses: Floats, delta: float) -> float:
    """The epsilon at which E[max(0, 1 - e^(epsilon - loss))] is delta; at least 0. By bisection, since e^loss
    overflows where losses are large."""
    low, high = 0.0, float(losses[-1])
    if _delta_at(losses, masses, low) <= delta:
        return 0.0
    while high - low > 1e-7 * max(1.0, low):
        middle = 0.5 * (low + high)
        above = _delta_at(losses, masses, middle) > delta
        low, high = (middle, high) if above else (low, middle)
    return high


def _delta_at(losses: Floats, masses: Floats, epsilon: float) -> float:
    first = int(np.searchsorted(losses, epsilon))
    return float(-(masses[first:] @ np.expm1(epsilon - losses[first:])))
