"""Shampoo (Gupta, Koren & Singer, "Shampoo: preconditioned stochastic tensor optimization", 2018).

A matrix' momentum is multiplied from both sides by inverse roots of the means of G Gᵀ and Gᵀ G. Its length is that of
an AdamW step then, as with Muon, so that both can have one learning rate (grafting; Anil et al., 2020).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from unisono.spec.training import Positive, Share, UpdateSizes
from unisono_contrib.train.optim._curved import Curved, Roots, counted

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Shampoo(Curved):
    """Matrices of blocks move by their momentum between two inverse roots; all other parameters by AdamW."""

    name: ClassVar[str] = "shampoo"
    shampoo_momentum: Share = Field(default=0.95, description="shampoo: decay of the momentum")
    shampoo_power: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        default=0.25, description="shampoo: of each side's inverse root; 0 is gradient descent"
    )
    shampoo_damping: Positive = Field(
        default=1e-5, description="shampoo: added to eigenvalues, as a share of their mean"
    )
    shampoo_rms: bool = Field(
        default=True, description="shampoo: give steps the root mean square of AdamW's; else their own"
    )

    @property
    def kept(self) -> int:
        return 1

    def bind(self, groups: Sequence[Mapping[str, Any]], lr: float, fused: bool) -> "torch.optim.Optimizer":
        from unisono_contrib.train.optim._curved_steps import ShampooSteps

        return ShampooSteps(
            [dict(group) for group in groups], lr, self.state, self.curvature_interval,
            (self.shampoo_momentum, self.curvature_decay), self.shampoo_power, self.shampoo_damping, self.shampoo_rms,
        )  # fmt: skip

    def state(self, parameter: "Tensor") -> "dict[str, Tensor]":
        import torch

        sides = self.sides(parameter)
        roots = {
            f"{side}_root": torch.eye(len(x), dtype=x.dtype, device=x.device) for side, x in sides.items()
        }
        step = parameter.new_zeros((), dtype=torch.float32)
        return {"step": step, "momentum_buffer": torch.zeros_like(parameter), **sides, **roots}

    def law(
        self,
        update: UpdateSizes,
        weight: "Tensor",
        state: "Mapping[str, Tensor]",
        grad: "Tensor",
        error: "Tensor",
    ) -> "dict[str, tuple[Tensor, Tensor]]":
        keep, rounding, old = self.shampoo_momentum, update.rounding, state["momentum_buffer"]
        momentum = keep * old + (1 - keep) * grad
        off = (1 - keep) * error + rounding * (keep * old.abs() + (1 - keep) * grad.abs())
        law = {"step": counted(update.step), "momentum_buffer": (momentum, off)}
        law |= self.means(state, grad, error, rounding)
        return self.between(
            Roots(self.shampoo_power, self.shampoo_damping, self.shampoo_rms), update, weight, state, law
        )
