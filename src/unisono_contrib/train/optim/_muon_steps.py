"""The live optimiser of `muon`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unisono_contrib.train.optim._whole_steps import WholeSteps, gradient

A, B, C = 3.4445, -4.7750, 2.0315
"""Of the polynomial a x + b x³ + c x⁵ by which an iteration moves a singular value (Jordan et al. 2024). It is steepest
at zero, so that small ones grow fast; values end between 0.6 and 1.3."""
LEAST = 1e-7  # a smaller norm is that of no matrix
RMS = 0.2  # of an AdamW step (Liu et al. 2025)


def scale_of(shape: Sequence[int]) -> float:
    """By what an orthogonal matrix is multiplied to have the root mean square of an AdamW step."""
    return RMS * math.sqrt(max(shape))


def orthogonal(x: Tensor, iterations: int) -> Tensor:
    """[m, n], roughly U Vᵀ of x = U S Vᵀ [m, n], whose singular values are near 1; in the dtype of `x`."""
    y = x.mT if x.shape[0] > x.shape[1] else x
    y = y / y.norm().clamp(min=LEAST)
    for _ in range(iterations):
        gram = y @ y.mT
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=B, alpha=C), y, beta=A)
    return y.mT if x.shape[0] > x.shape[1] else y


def orthogonal_within(x: Tensor, error: Tensor, iterations: int, rounding: float) -> tuple[Tensor, Tensor]:
    """(`orthogonal(x)`, the largest absolute error of an element) in float64, if x is off by `error`, by element.

    The iterations apply a function to singular values. Such a map stretches a distance of matrices, in the Frobenius
    norm, by no more than the function is steep (Andersson, Carlsson & Perfekt, "Operator-Lipschitz estimates for the
    singular value functional calculus", 2016), and dividing by the norm first does so by 2 over the norm."""
    x = x.double()
    value, steep, norm = orthogonal(x, iterations), A**iterations, float(x.norm())
    most = 2.0 * 1.3  # two matrices whose singular values are at most 1.3
    if not norm:
        return value, torch.full_like(value, most if bool(error.any()) else 0.0)
    rounded = 2.0 * rounding * math.sqrt(min(x.shape))
    off = steep * (2.0 * float(error.norm()) / norm + rounded)
    return value, torch.full_like(value, min(off, most))


class MuonSteps(WholeSteps):
    """Steps matrices along their orthogonal momentum, each rank keeping its part of that. bf16: iterate in it."""

    def __init__(
        self, groups: Sequence[dict[str, Any]], lr: float, momentum: float, iterations: int, bf16: bool
    ) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})
        self.iterations, self.bf16 = iterations, bf16

    def send(self, p: nn.Parameter, group: Mapping[str, Any]) -> Tensor:
        state, keep, grad = self.state[p], group["momentum"], gradient(p)
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        momentum = state["momentum_buffer"].lerp_(grad, 1 - keep)
        ahead = grad.lerp(momentum, keep)
        return ahead.bfloat16() if self.bf16 else ahead

    def direction(self, p: nn.Parameter, whole: Tensor, group: Mapping[str, Any]) -> Tensor:
        return orthogonal(whole, self.iterations)

    def scale(self, shape: Sequence[int]) -> float:
        return scale_of(shape)
