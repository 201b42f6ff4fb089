"""Shampoo (Gupta, Koren & Singer, "Shampoo: preconditioned stochastic tensor optimization", 2018).

A matrix' momentum is multiplied from both sides by inverse roots of the means of G Gᵀ and Gᵀ G. Its length is that of
an AdamW step then, as with Muon, so that both can have one learning rate (grafting; Anil et al., 2020).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from unisono.spec.training import Positive, Share, UpdateSizes
from unisono_contrib.train.optim._curved import Curved, counted

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
        """Errors of the direction are bounded in the Frobenius norm, from which no element differs by more."""
        import torch

        from unisono_contrib.train.optim._curved_steps import inverse_root_within, rotated, to_rms

        keep, rounding, old = self.shampoo_momentum, update.rounding, state["momentum_buffer"]
        momentum = keep * old + (1 - keep) * grad
        off = (1 - keep) * error + rounding * (keep * old.abs() + (1 - keep) * grad.abs())
        law = {"step": counted(update.step), "momentum_buffer": (momentum, off)}
        law |= self.means(state, grad, error, rounding)
        roots: list[Tensor | None] = []
        length, most = float(momentum.norm()), float(momentum.norm() + off.norm())
        for side in ("left", "right"):
            if side not in state:
                roots.append(None)
                continue
            root, apart = state[f"{side}_root"], 0.0
            if update.step % self.curvature_interval == 0:
                how = self.shampoo_power, self.shampoo_damping, rounding
                root, apart = inverse_root_within(*law[side], *how)
            law[f"{side}_root"] = root, torch.full_like(root, apart)
            size = float(torch.linalg.matrix_norm(root, 2))
            roots.append(root)
            length, most = length * size, most * (size + apart) * (1 + rounding * len(root) ** 0.5)
        move, apart = rotated(momentum, *roots), most - length + rounding * length
        if self.shampoo_rms:
            short = float(move.norm())
            move, relative = to_rms(move), min(2.0, 2 * apart / short) if short else 2.0
            apart = relative * float(move.norm())
        left = weight * (1 - update.lr * update.decay)
        moved = update.lr * apart + rounding * (weight.abs() + update.lr * move.abs())
        return {**law, "param": (left - update.lr * move, moved)}
