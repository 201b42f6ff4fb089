"""LARS (You, Gitman & Ginsburg, "Large batch training of convolutional networks", 2017, arXiv 1708.03888)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from unisono.spec.training import Optimiser, Positive, UpdateSizes
from unisono.train.optim.sgd import Momentum
from unisono_contrib.train.optim._trust import Trusting

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Lars(Trusting, Momentum):
    """Descent with momentum; the gradient of each matrix, with its decay, is scaled to a share of the matrix' norm."""

    name: ClassVar[str] = "lars"
    trust_coefficient: Positive = Field(
        default=0.001, description="lars: norm of a gradient after scaling, as a share of the weights' norm"
    )

    def plain(self) -> Optimiser:
        return Momentum(momentum=self.momentum)

    def bind(self, groups: Sequence[Mapping[str, Any]], lr: float, fused: bool) -> "torch.optim.Optimizer":
        from unisono_contrib.train.optim._trust_steps import LarsSteps

        plain = [dict(group) for group in groups]
        return LarsSteps(plain, lr, self.momentum, self.trust_coefficient, self.trust_clip)

    def law(
        self,
        update: UpdateSizes,
        weight: "Tensor",
        state: "Mapping[str, Tensor]",
        grad: "Tensor",
        error: "Tensor",
    ) -> "dict[str, tuple[Tensor, Tensor]]":
        from unisono_contrib.train.optim._trust_laws import scaled_within

        pull, norm, rounding = update.decay * weight, float(weight.norm()), update.rounding
        along, off = grad + pull, error + rounding * (grad.abs() + pull.abs())
        below = float(grad.norm()) + update.decay * norm, float(error.norm())
        along, off = scaled_within(
            along, off, self.trust_coefficient * norm, self.trust_clip, rounding, below
        )
        # The rest is descent along a gradient that was scaled, without decay.
        descent = UpdateSizes(update.lr, 0.0, update.step, rounding)
        return super().law(descent, weight, state, along, off)
