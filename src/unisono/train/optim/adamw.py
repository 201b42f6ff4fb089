"""AdamW (Loshchilov & Hutter, "Decoupled weight decay regularization", 2019)."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from unisono.spec.training import Optimiser, Positive, Share, UpdateSizes

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class AdamW(Optimiser):
    """Each element's step is its mean gradient over the root of its mean square; weights decay beside it."""

    name: ClassVar[str] = "adamw"
    apart: ClassVar[bool] = True
    squares: ClassVar[bool] = True
    betas: tuple[Share, Share] = Field(
        default=(0.9, 0.95), description="adamw, lamb, lans and the like: decay of the two moments"
    )
    eps: Positive = Field(default=1e-8, description="added to the root of the squares, not for sgd")

    @property
    def kept(self) -> int:
        return 2

    @property
    def reach(self) -> float:
        """Learning rates that an element moves in a step at most."""
        return math.inf

    def learnt(self, step: int) -> int:
        """In how many of the first `step` steps the second moment learns."""
        return step

    def bind(self, groups: Sequence[Mapping[str, Any]], lr: float, fused: bool) -> "torch.optim.Optimizer":
        from torch.optim import AdamW as Live

        return Live([dict(group) for group in groups], lr=lr, betas=self.betas, eps=self.eps, fused=fused)

    def state(self, parameter: "Tensor") -> "dict[str, Tensor]":
        import torch

        return {
            "step": parameter.new_zeros((), dtype=torch.float32),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }

    def law(
        self,
        update: UpdateSizes,
        weight: "Tensor",
        state: "Mapping[str, Tensor]",
        grad: "Tensor",
        error: "Tensor",
    ) -> "dict[str, tuple[Tensor, Tensor]]":
        kept, move, move_error = self.direction(update, state, grad, error)
        move, move_error = update.lr * move, update.lr * move_error + update.rounding * update.lr * move.abs()
        left = weight * (1 - update.lr * update.decay)
        return kept | {"param": (left - move, move_error + update.rounding * (weight.abs() + move.abs()))}

    def direction(
        self, update: UpdateSizes, state: "Mapping[str, Tensor]", grad: "Tensor", error: "Tensor"
    ) -> "tuple[dict[str, tuple[Tensor, Tensor]], Tensor, Tensor]":
        """(state after the update, as `law` has it; the mean gradient over the root of the mean square, both corrected
        for their start; the largest absolute error of that). A second moment that does not learn has no error."""
        import torch

        g, (b1, b2), t, rounding = grad, self.betas, update.step + 1, update.rounding
        m, v = state["exp_avg"], state["exp_avg_sq"]
        m1, m1_size = b1 * m + (1 - b1) * g, b1 * m.abs() + (1 - b1) * g.abs()
        m_error = (1 - b1) * error + rounding * m1_size
        v1, v_error = v, torch.zeros_like(v)
        if self.learnt(t) > self.learnt(t - 1):
            v1 = b2 * v + (1 - b2) * g * g
            v_error = (1 - b2) * (2 * g.abs() * error + error * error) + rounding * v1
            v_error = v_error + torch.finfo(torch.float32).tiny
        rate, most = 1 / (1 - b1**t), self.reach
        move, move_error = self.quotient(update, (rate * m1, rate * m_error), (v1, v_error))
        kept = {
            "exp_avg": (m1, m_error),
            "exp_avg_sq": (v1, v_error),
            "step": (torch.full((), float(t), dtype=torch.float64), torch.zeros((), dtype=torch.float64)),
        }
        return kept, move.clamp(-most, most), move_error.clamp(max=2 * most)

    def quotient(
        self, update: UpdateSizes, above: "tuple[Tensor, Tensor]", square: "tuple[Tensor, Tensor]"
    ) -> "tuple[Tensor, Tensor]":
        """(`above` over the root of a second moment, corrected for its start, and eps; its largest absolute error).
        above, square: values, each with its error. It is bounded with the least denominator that the error allows."""
        import torch

        (x, x_error), (v, v_error) = above, square
        root, low, high = v.sqrt(), (v - v_error).clamp(min=0).sqrt(), (v + v_error).sqrt()
        scale = math.sqrt(1 - self.betas[1] ** self.learnt(update.step + 1))
        below, least = root / scale + self.eps, low / scale + self.eps
        below_error = torch.maximum(high - root, root - low) / scale + update.rounding * below
        return x / below, x_error / least + x.abs() * below_error / (least * below)
