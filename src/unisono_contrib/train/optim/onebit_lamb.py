"""1-bit LAMB (Li et al., "1-bit LAMB: communication efficient large-scale large-batch training with LAMB's convergence
speed", 2021)."""

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

        return OneBitLambSteps([dict(group) for group in groups], lr, self)

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
        from unisono_contrib.train.optim._onebit_lamb_steps import law

        return law(self, update, weight, state, grad, error)
