"""1-bit LAMB (Li et al., "1-bit LAMB: communication efficient large-scale large-batch training with LAMB's convergence
speed", 2021)."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from unisono.spec.training import Optimiser, Positive, Share, UpdateSizes
from unisono_contrib.train.optim._trust import Trusting
from unisono_contrib.train.optim.onebit_adam import OneBitAdam

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class OneBitLamb(Trusting, OneBitAdam):
    """LAMB for some steps; then its second moment and mean trust ratios are frozen, and codecs are given the first."""

    name: ClassVar[str] = "onebit_lamb"
    trust_decay: Share = Field(default=0.9, description="onebit_lamb: decay of the mean trust ratio")
    trust_factor: tuple[Positive, Positive] = Field(
        default=(0.5, 4.0),
        description="onebit_lamb: least and greatest factor of a frozen ratio, by what the second moment has become",
    )
    trust_change: Share = Field(
        default=0.1, description="onebit_lamb: share by which this factor changes in a step at most"
    )

    @property
    def kept(self) -> int:
        return 3

    def plain(self) -> Optimiser:
        return OneBitAdam(betas=self.betas, eps=self.eps, variance_steps=self.variance_steps)

    def factor_bounds(self, last: float) -> tuple[float, float]:
        """Least and greatest factor after one that was `last`."""
        (low, high), change = self.trust_factor, self.trust_change
        return max(low, last * (1 - change)), min(high, last * (1 + change))

    def bind(self, groups: Sequence[Mapping[str, Any]], lr: float, fused: bool) -> "torch.optim.Optimizer":
        from unisono_contrib.train.optim._onebit_lamb_steps import OneBitLambSteps

        return OneBitLambSteps(
            [dict(group) for group in groups], lr, self.betas, self.eps, self.trust_clip, self.reach, self.learnt,
            self.trust_decay, self.factor_bounds,
        )  # fmt: skip

    def state(self, parameter: "Tensor") -> "dict[str, Tensor]":
        from unisono_contrib.train.optim._onebit_lamb_steps import first_state

        return first_state(parameter)

    def law(
        self,
        update: UpdateSizes,
        weight: "Tensor",
        state: "Mapping[str, Tensor]",
        grad: "Tensor",
        error: "Tensor",
    ) -> "dict[str, tuple[Tensor, Tensor]]":
        import torch

        from unisono_contrib.train.optim._onebit_lamb_steps import FACTOR, FRESH, MEAN
        from unisono_contrib.train.optim._trust_laws import norm_rounding, ratio_within, scaled_within

        rounding, clip, decay = update.rounding, self.trust_clip, self.trust_decay
        learnt = self.learnt(update.step + 1)
        kept, move, off = self.direction(update, state, grad, error)
        fresh = self._fresh(update, state[FRESH], grad, error)
        pull = update.decay * weight
        along, off = move + pull, off + rounding * (move.abs() + pull.abs())
        mean, factor = float(state[MEAN]), float(state[FACTOR])
        mean_off = factor_off = 0.0
        if learnt > self.learnt(update.step):
            norms = float(weight.norm()), float(along.norm())
            ratio, ratio_off = ratio_within(*norms, float(off.norm()), norm_rounding(rounding, weight), clip)
            moved, off = scaled_within(along, off, norms[0], clip, rounding)
            mean = decay * mean + (1 - decay) * ratio
            mean_off = (1 - decay) * ratio_off + rounding * mean
        else:
            factor, factor_off = self._factor(update, factor or 1.0, kept["exp_avg_sq"], fresh)
            frozen = mean / (1 - decay**learnt)
            ratio, ratio_off = frozen * factor, frozen * factor_off + rounding * frozen * factor
            moved, off = ratio * along, (ratio + ratio_off) * off + ratio_off * along.abs()
        rounded = rounding * (weight.abs() + update.lr * moved.abs())
        numbers = {
            key: (torch.tensor(value, dtype=torch.float64), torch.tensor(wrong, dtype=torch.float64))
            for key, value, wrong in ((MEAN, mean, mean_off), (FACTOR, factor, factor_off))
        }
        return (
            kept | {FRESH: fresh, "param": (weight - update.lr * moved, update.lr * off + rounded)} | numbers
        )

    def _fresh(
        self, update: UpdateSizes, square: "Tensor", grad: "Tensor", error: "Tensor"
    ) -> "tuple[Tensor, Tensor]":
        """The second moment that goes on learning, and its largest absolute error."""
        import torch

        share = 1 - self.betas[1]
        after = self.betas[1] * square + share * grad * grad
        off = share * (2 * grad.abs() * error + error * error) + update.rounding * after
        return after, off + torch.finfo(torch.float32).tiny

    def _factor(
        self,
        update: UpdateSizes,
        last: float,
        frozen: "tuple[Tensor, Tensor]",
        fresh: "tuple[Tensor, Tensor]",
    ) -> tuple[float, float]:
        """(factor of a frozen ratio after one that was `last`, its largest absolute error)."""
        b2, t = self.betas[1], update.step + 1
        above = frozen[0].sqrt() / math.sqrt(1 - b2 ** self.learnt(t)) + self.eps
        low, high = self.factor_bounds(last)

        def largest(square: "Tensor") -> float:
            below = square.clamp(min=0).sqrt() / math.sqrt(1 - b2**t) + self.eps
            return min(max(float((above / below).max()), low), high)

        value = largest(fresh[0])
        ends = largest(fresh[0] - fresh[1]), largest(fresh[0] + fresh[1])
        return value, max(abs(end - value) for end in ends) + update.rounding * value
