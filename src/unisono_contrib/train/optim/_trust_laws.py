"""Trust ratios, and how far an error of a gradient moves a step that is scaled by one."""

import math

import torch
from torch import Tensor

Clip = tuple[float, float] | None
"""Least and greatest trust ratio; None: any."""


def trust_ratio(above: float, below: float, clip: Clip) -> float:
    """The quotient of two norms, between the bounds of `clip`. It is 1 where a norm is zero: a weight that begins at
    zero would stay there for ever."""
    ratio = above / below if above > 0 and below > 0 else 1.0
    return min(max(ratio, clip[0]), clip[1]) if clip else ratio


def ratio_within(above: float, below: float, off: float, rounding: float, clip: Clip) -> tuple[float, float]:
    """(`trust_ratio(above, below)`, its largest absolute error, which may be infinite). off: absolute error of `below`.
    rounding: relative error of each norm."""
    ratio = trust_ratio(above, below, clip)
    if above == 0:
        return ratio, 0.0
    low, high = (below - off) * (1 - rounding), (below + off) * (1 + rounding)
    if low <= 0 and not clip:
        return ratio, math.inf
    ends = [trust_ratio(above * (1 - rounding), high, clip)]
    ends += [trust_ratio(above * (1 + rounding), low, clip)] if low > 0 else [*(clip or ())]
    return ratio, max(abs(end - ratio) for end in ends)


def scaled_within(
    x: Tensor,
    error: Tensor,
    above: float,
    clip: Clip,
    rounding: float,
    below: tuple[float, float] | None = None,
) -> tuple[Tensor, Tensor]:
    """(x times `trust_ratio(above, below)`, its largest absolute error by element) in float64, for an x that is off by
    `error`, by element. below: a norm and its absolute error; None: that of x. It is at least the norm of x, so what
    is scaled has no element above `above`, however large the error."""
    norm, off = below or (float(x.norm()), float(error.norm()))
    ratio, ratio_off = ratio_within(above, norm, off, norm_rounding(rounding, x), clip)
    moved = ratio * x
    anywhere = moved.abs() + (x.abs() + error).clamp(min=above) * max(1.0, clip[0] if clip else 1.0)
    if math.isinf(ratio_off):
        return moved, anywhere
    within = x.abs() * ratio_off + (ratio + ratio_off) * error + rounding * moved.abs()
    return moved, torch.minimum(within, anywhere)


def norm_rounding(rounding: float, x: Tensor) -> float:
    """Relative error of the 2-norm of x. rounding: of a formula of some operations. A sum has many, whose errors add up
    as a random walk does."""
    return rounding * (1.0 + math.sqrt(x.numel()))
