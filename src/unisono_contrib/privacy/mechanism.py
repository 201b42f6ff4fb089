"""The sampled Gaussian mechanism: the step of DP-SGD (Abadi et al. 2016) as an accountant sees it. No torch.

A step includes each sample with probability `rate`, independently (Poisson sampling). It adds up the samples' vectors,
each of norm at most C. It adds noise of standard deviation `noise · C` to each coordinate. Two data sets are neighbours
if one has one more sample.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.spec.errors import UsageError

Floats = NDArray[Any]  # of float64


@dataclass(frozen=True, slots=True)
class SampledGaussian:
    """`steps` steps of one kind. noise: standard deviation over the norm bound, 0 for none. rate: probability that a
    step includes a sample, from 0 to 1.

    `SampledGaussian(noise=1.1, rate=256 / 60_000, steps=14_062)`. Raises UsageError C02 for a value out of range.
    """

    noise: float
    rate: float
    steps: int

    def __post_init__(self) -> None:
        for name, value, right in (
            ("noise", self.noise, math.isfinite(self.noise) and self.noise >= 0),
            ("rate", self.rate, 0.0 <= self.rate <= 1.0),
            ("steps", self.steps, self.steps >= 0),
        ):
            if not right:
                what = f"a sampled Gaussian mechanism with {name} {value}"
                raise UsageError(
                    what, where=name, fix="noise and steps from 0, a rate from 0 to 1", code="C02"
                )

    @property
    def reveals(self) -> bool:
        """Whether it reveals anything: it has steps, and they include samples."""
        return self.steps > 0 and self.rate > 0

    def loss(self, x: Floats) -> Floats:
        """The privacy loss of an outcome: log of its density with the sample over its density without it.

        x [n]: a step's outcome along the sample's vector, in units of C. Without the sample it is drawn from
        N(0, noise²), with it from (1 - rate) N(0, noise²) + rate N(1, noise²)."""
        gain = (x - 0.5) / self.noise**2
        if self.rate == 1.0:
            return gain
        return np.logaddexp(math.log1p(-self.rate), math.log(self.rate) + gain)

    def outcomes(self, reach: float = 1.0) -> Floats:
        """A grid of outcomes [n], dense and wide enough for the trapezoidal rule to be exact to rounding: from -14
        standard deviations to `reach` and 14 more. The integrands are analytic and vanish at both ends."""
        width = min(self.noise, 2.0 * self.noise**2 + 0.02)  # the loss bends within noise² of x
        first, last = -14.0 * self.noise, reach + 14.0 * self.noise
        return np.linspace(first, last, 2 + math.ceil((last - first) / width * 24))

    def density(self, x: Floats) -> Floats:
        """log of the density without the sample, [n]."""
        return -0.5 * (x / self.noise) ** 2 - math.log(self.noise * math.sqrt(2.0 * math.pi))


def require_delta(delta: float) -> None:
    """Raises UsageError C02 unless delta is a probability between 1e-12 and 1. Below, rounding would decide."""
    if not 1e-12 <= delta < 1.0:
        fix = "a delta below one over the number of samples, such as 1e-5; at least 1e-12"
        raise UsageError(f"delta is {delta}", where="delta", fix=fix, code="C02")


def without_bound(history: Sequence[SampledGaussian]) -> bool:
    """Whether some step had no noise, so that no epsilon holds."""
    return any(step.reveals and step.noise == 0.0 for step in history)
