"""SOAP (Vyas et al., "SOAP: improving and stabilizing Shampoo using Adam", 2024).

AdamW, in the eigenvectors of Shampoo's two means in the place of rows and columns. Until the first decomposition, which
follows the first step, these are rows and columns themselves. The eigenvectors are computed anew each time, where the
paper improves old ones.
"""

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import TYPE_CHECKING, Any, ClassVar

from unisono.spec.training import UpdateSizes
from unisono.train.optim.adamw import AdamW
from unisono_contrib.train.optim._curved import Curved

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Soap(Curved):
    """Matrices of blocks are stepped by AdamW in eigenvectors of their curvature; all other parameters as they are."""

    name: ClassVar[str] = "soap"
    turns: ClassVar[int] = 3  # the gradient and the momentum into eigenvectors, the step back

    @property
    def kept(self) -> int:
        return 2

    def bind(self, groups: Sequence[Mapping[str, Any]], lr: float, fused: bool) -> "torch.optim.Optimizer":
        from unisono_contrib.train.optim._curved_steps import SoapSteps

        plain, how = [dict(group) for group in groups], (self.betas, self.curvature_decay, self.eps)
        return SoapSteps(plain, lr, self.state, self.curvature_interval, *how)

    def state(self, parameter: "Tensor") -> "dict[str, Tensor]":
        import torch

        sides = self.sides(parameter)
        bases = {
            f"{side}_basis": torch.eye(len(x), dtype=x.dtype, device=x.device) for side, x in sides.items()
        }
        return {**AdamW(betas=self.betas, eps=self.eps).state(parameter), **sides, **bases}

    def law(
        self,
        update: UpdateSizes,
        weight: "Tensor",
        state: "Mapping[str, Tensor]",
        grad: "Tensor",
        error: "Tensor",
    ) -> "dict[str, tuple[Tensor, Tensor]]":
        """That of AdamW for what the eigenvectors see, turned back. Turning a matrix rounds it a little more."""
        import torch

        from unisono_contrib.train.optim._curved_steps import basis_within, rotated

        adamw, (b1, _), rounding = AdamW(betas=self.betas, eps=self.eps), self.betas, update.rounding
        bases = state.get("left_basis"), state.get("right_basis")
        sizes = tuple(None if q is None else q.abs() for q in bases)
        back = tuple(None if q is None else q.mT for q in bases)
        turn = 0.0 if bases == (None, None) else rounding * sqrt(max(grad.shape))
        past = state["exp_avg"]
        seen_error = rotated(error, *sizes) + turn * rotated(grad.abs() + b1 / (1 - b1) * past.abs(), *sizes)
        seen_state = {**state, "exp_avg": rotated(past, *bases)}
        plain = UpdateSizes(1.0, 0.0, update.step, rounding)
        seen = adamw.law(plain, torch.zeros_like(weight), seen_state, rotated(grad, *bases), seen_error)
        value, apart = seen["param"]
        size_back = tuple(None if q is None else q.mT for q in sizes)
        move, off = rotated(value, *back), rotated(apart + turn * value.abs(), *size_back)
        left = weight * (1 - update.lr * update.decay)
        moved = update.lr * off + rounding * (weight.abs() + update.lr * move.abs())
        law = {
            "step": seen["step"],
            "exp_avg_sq": seen["exp_avg_sq"],
            "param": (left + update.lr * move, moved),
        }
        law["exp_avg"] = adamw.law(update, weight, {**state}, grad, error)["exp_avg"]
        law |= self.means(state, grad, error, rounding)
        for side in (side for side in ("left", "right") if side in state):
            key = f"{side}_basis"
            fixed = state[key], torch.zeros_like(state[key])
            anew = update.step % self.curvature_interval == 0
            law[key] = basis_within(*law[side], rounding) if anew else fixed
        return law
