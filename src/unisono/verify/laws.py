"""What the recipe makes of a gradient: clipping and the optimiser's formula, with the error that each passes on.

One function serves two questions. From the reference's gradient and its bound: how far may parameters and moments be
from the reference's? And from the plan's own gradient and no error at all: did the plan follow the formula? The second
is the sharper one: it finds what is wrong with an update although all gradients are right.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.config import TrainConfig

OPERATIONS = 16  # roundings of one optimiser formula, counted generously: all of them touch the same element


@dataclass(frozen=True, slots=True)
class Rule:
    """How one tensor is updated. step: updates made before this one."""

    train: TrainConfig
    lr: float
    decay: float
    step: int


def rule_of(train: TrainConfig, dims: int, lr: float, step: int) -> Rule:
    """The rule of a tensor with `dims` dims: matrices decay, vectors do not."""
    return Rule(train, lr, train.weight_decay if dims >= 2 else 0.0, step)


def clip_factor(norm: float, limit: float) -> float:
    """What gradients of that norm are multiplied by (Pascanu et al., 2013)."""
    return limit / (norm + 1e-6) if limit and norm > limit else 1.0


def update(
    rule: Rule, param: Tensor, state: Mapping[str, Tensor], grad: Tensor, error: Tensor | float, unit: float
) -> dict[str, tuple[Tensor, Tensor]]:
    """key → (value, largest absolute error), float64, for "param" and every tensor of the optimiser's state.

    error: absolute, of `grad`, by element. unit: roundoff of the run that is predicted.
    """
    p, g = param.double(), grad.double()
    e = torch.as_tensor(error, dtype=torch.float64).expand_as(g)
    rounding = OPERATIONS * unit
    form = _sgd if rule.train.optimizer == "sgd" else _adamw
    return form(rule, p, {k: v.double() for k, v in state.items()}, g, e, rounding)


def _sgd(
    rule: Rule, p: Tensor, state: Mapping[str, Tensor], g: Tensor, e: Tensor, rounding: float
) -> dict[str, tuple[Tensor, Tensor]]:
    """Momentum after Sutskever et al. (2013), as torch has it: the decay is part of the gradient."""
    pull = rule.decay * p
    velocity, size = g + pull, g.abs() + pull.abs()
    out = {}
    if rule.train.momentum:
        old = rule.train.momentum * state["momentum_buffer"]
        velocity, size = velocity + old, size + old.abs()
        out["momentum_buffer"] = (velocity, e + rounding * size)
    out["param"] = (p - rule.lr * velocity, rule.lr * e + rounding * (p.abs() + rule.lr * size))
    return out


def _adamw(
    rule: Rule, p: Tensor, state: Mapping[str, Tensor], g: Tensor, e: Tensor, rounding: float
) -> dict[str, tuple[Tensor, Tensor]]:
    """AdamW (Loshchilov & Hutter, 2019). The quotient is bounded with the least denominator that the error allows."""
    (b1, b2), eps, t = rule.train.betas, rule.train.eps, rule.step + 1
    m, v = state["exp_avg"], state["exp_avg_sq"]
    m1, m1_size = b1 * m + (1 - b1) * g, b1 * m.abs() + (1 - b1) * g.abs()
    v1 = b2 * v + (1 - b2) * g * g
    m_error = (1 - b1) * e + rounding * m1_size
    v_error = (1 - b2) * (2 * g.abs() * e + e * e) + rounding * v1 + torch.finfo(torch.float32).tiny
    root, low, high = v1.sqrt(), (v1 - v_error).clamp(min=0).sqrt(), (v1 + v_error).sqrt()
    scale = math.sqrt(1 - b2**t)
    below, least = root / scale + eps, low / scale + eps
    below_error = torch.maximum(high - root, root - low) / scale + rounding * below
    rate = rule.lr / (1 - b1**t)
    move = rate * m1 / below
    move_error = rate * (m_error / least + m1.abs() * below_error / (least * below)) + rounding * move.abs()
    counter = torch.full((), float(t), dtype=torch.float64)
    return {
        "exp_avg": (m1, m_error),
        "exp_avg_sq": (v1, v_error),
        "step": (counter, torch.zeros((), dtype=torch.float64)),
        "param": (p * (1 - rule.lr * rule.decay) - move, move_error + rounding * (p.abs() + move.abs())),
    }
