"""The live optimiser of `onebit_lamb`, and its law.

While the second moment learns, a mean of trust ratios is kept. After that a ratio is the frozen mean times a factor.
The factor follows a second moment that goes on learning, from gradients that were rebuilt of coded moments: it is the
largest quotient of an element's frozen root and the one of now.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from unisono.spec.training import UpdateSizes
from unisono_contrib.train.optim._normed_steps import grads_of
from unisono_contrib.train.optim._trust_laws import norm_rounding, ratio_within, scaled_within, trust_ratio
from unisono_contrib.train.optim._trust_steps import MomentSteps, decayed_

if TYPE_CHECKING:
    from unisono_contrib.train.optim.onebit_lamb import OneBitLamb

FRESH, MEAN, FACTOR = "exp_avg_sq_fresh", "trust_mean", "trust_last_factor"


def first_state(parameter: Tensor) -> dict[str, Tensor]:
    """Before the first step; numbers of no dims lie on the host. The mean ratio begins at zero, and is divided by what
    it has seen of its mean, as moments are. A factor of zero is that of no step yet."""
    return {
        "step": torch.zeros((), dtype=torch.float32),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
        FRESH: torch.zeros_like(parameter),
        MEAN: torch.zeros((), dtype=torch.float64),
        FACTOR: torch.zeros((), dtype=torch.float64),
    }


class OneBitLambSteps(MomentSteps):
    """Columns of norms: weights, steps; of the largest elements: frozen roots over those of now."""

    largest: ClassVar[tuple[int, ...]] = (2,)

    def __init__(self, groups: Sequence[dict[str, Any]], lr: float, member: "OneBitLamb") -> None:
        super().__init__(groups, lr, member.betas, member.eps, member.trust_clip)
        self.member = member

    def first_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return first_state(parameter)

    def make_pass(self, number: int, group: dict[str, Any], params: list[Tensor], count: int) -> None:
        learnt = self.member.learnt(count + 1)
        learns = learnt > self.member.learnt(count)
        if number == 0:
            self._learn(params, learns)
        moves, most = self.means(params, count + 1), self.member.reach
        below = self.roots(params, learnt)
        torch._foreach_div_(moves, below)
        torch._foreach_clamp_max_(moves, most)
        torch._foreach_clamp_min_(moves, -most)
        decayed_(moves, params, group["weight_decay"])
        if number == 0:
            self.norms.measure(0, params, params)
            self.norms.measure(1, params, moves)
            torch._foreach_div_(below, self.roots(params, count + 1, FRESH))
            self.norms.measure_largest(2, params, below)
            return
        rates = [
            group["lr"] * self._ratio(p, norms, learns, learnt)
            for p, norms in zip(params, self.norms.of(params), strict=True)
        ]
        torch._foreach_mul_(moves, rates)
        torch._foreach_sub_(params, moves)
        self.count_step(params)

    def _learn(self, params: list[Tensor], learns: bool) -> None:
        grads = grads_of(params)
        self.learn("exp_avg", params, self.betas[0], grads)
        squares = list(torch._foreach_mul(grads, grads))
        for key in ("exp_avg_sq", FRESH) if learns else (FRESH,):
            self.learn(key, params, self.betas[1], squares)

    def _ratio(self, p: Tensor, norms: Sequence[float], learns: bool, learnt: int) -> float:
        """The trust ratio of a parameter's step, which changes what is kept of ratios. norms: its columns."""
        weight, move, quotient = norms
        state, decay = self.state[p], self.member.trust_decay
        if learns:
            ratio = trust_ratio(weight, move, self.clip)
            state[MEAN].mul_(decay).add_((1 - decay) * ratio)
            return ratio
        low, high = self.member.factor_bounds(float(state[FACTOR]) or 1.0)
        state[FACTOR].fill_(min(max(quotient, low), high))
        return float(state[MEAN]) / (1 - decay**learnt) * float(state[FACTOR])


def law(
    member: "OneBitLamb",
    update: UpdateSizes,
    weight: Tensor,
    state: Mapping[str, Tensor],
    grad: Tensor,
    error: Tensor,
) -> dict[str, tuple[Tensor, Tensor]]:
    """As of `Optimiser.law`."""
    rounding, count, clip = update.rounding, update.step, member.trust_clip
    learnt = member.learnt(count + 1)
    kept, move, off = member.direction(update, state, grad, error)
    fresh, decay = _fresh(member, update, state[FRESH], grad, error), member.trust_decay
    pull = update.decay * weight
    along, off = move + pull, off + rounding * (move.abs() + pull.abs())
    mean, factor = float(state[MEAN]), float(state[FACTOR])
    mean_off = factor_off = 0.0
    if learnt > member.learnt(count):
        norms = float(weight.norm()), float(along.norm())
        ratio, ratio_off = ratio_within(*norms, float(off.norm()), norm_rounding(rounding, weight), clip)
        moved, off = scaled_within(along, off, norms[0], clip, rounding)
        mean, mean_off = (
            decay * mean + (1 - decay) * ratio,
            (1 - decay) * (ratio_off + rounding * ratio) + rounding * mean,
        )
    else:
        factor, factor_off = _factor(member, update, factor or 1.0, kept["exp_avg_sq"], fresh)
        ratio = mean / (1 - decay**learnt) * factor
        ratio_off = mean / (1 - decay**learnt) * factor_off + rounding * ratio
        moved = ratio * along
        off = (ratio + ratio_off) * off + ratio_off * along.abs()
    rounded = rounding * (weight.abs() + update.lr * moved.abs())
    numbers = {
        key: (torch.tensor(value, dtype=torch.float64), torch.tensor(wrong, dtype=torch.float64))
        for key, value, wrong in ((MEAN, mean, mean_off), (FACTOR, factor, factor_off))
    }
    return kept | {FRESH: fresh, "param": (weight - update.lr * moved, update.lr * off + rounded)} | numbers


def _fresh(
    member: "OneBitLamb", update: UpdateSizes, square: Tensor, grad: Tensor, error: Tensor
) -> tuple[Tensor, Tensor]:
    """The second moment that goes on learning, and its largest absolute error."""
    share = 1 - member.betas[1]
    after = member.betas[1] * square + share * grad * grad
    off = share * (2 * grad.abs() * error + error * error) + update.rounding * after
    return after, off + torch.finfo(torch.float32).tiny


def _factor(
    member: "OneBitLamb",
    update: UpdateSizes,
    last: float,
    frozen: tuple[Tensor, Tensor],
    fresh: tuple[Tensor, Tensor],
) -> tuple[float, float]:
    """(factor of a frozen ratio, its largest absolute error)."""
    b2, t, eps = member.betas[1], update.step + 1, member.eps
    above = frozen[0].sqrt() / math.sqrt(1 - b2 ** member.learnt(t)) + eps

    def largest(square: Tensor) -> float:
        low, high = member.factor_bounds(last)
        below = square.clamp(min=0).sqrt() / math.sqrt(1 - b2**t) + eps
        return min(max(float((above / below).max()), low), high)

    value = largest(fresh[0])
    ends = largest(fresh[0] - fresh[1]), largest(fresh[0] + fresh[1])
    return value, max(abs(end - value) for end in ends) + update.rounding * value
