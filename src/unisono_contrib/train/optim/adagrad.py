"""Adagrad (Duchi et al., "Adaptive subgradient methods", 2011)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from unisono.spec.training import Optimiser, Positive, UpdateSizes

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Adagrad(Optimiser):
    """Each element's gradient over the root of the sum of all its squares so far; the decay is part of the gradient."""

    name: ClassVar[str] = "adagrad"
    apart: ClassVar[bool] = True
    couples: ClassVar[bool] = True
    squares: ClassVar[bool] = True
    eps: Positive = Field(default=1e-8, description="added to the root of the squares, not for sgd")

    @property
    def kept(self) -> int:
        return 1

    def bind(self, groups: Sequence[Mapping[str, Any]], lr: float, fused: bool) -> "torch.optim.Optimizer":
        from torch.optim import Adagrad as Live

        return Live([dict(group) for group in groups], lr=lr, eps=self.eps, foreach=False)

    def state(self, parameter: "Tensor") -> "dict[str, Tensor]":
        import torch

        return {
            "step": parameter.new_zeros((), dtype=torch.float32),
            "sum": torch.zeros_like(parameter),
        }

    def law(
        self,
        update: UpdateSizes,
        weight: "Tensor",
        state: "Mapping[str, Tensor]",
        grad: "Tensor",
        error: "Tensor",
    ) -> "dict[str, tuple[Tensor, Tensor]]":
        """The quotient is bounded with the least denominator that the error allows."""
        import torch

        rounding, pull = update.rounding, update.decay * weight
        g, size = grad + pull, grad.abs() + pull.abs()
        g_error = error + rounding * size
        total = state["sum"] + g * g
        total_error = (
            2 * g.abs() * g_error + g_error * g_error + rounding * total + torch.finfo(torch.float32).tiny
        )
        root, low = total.sqrt(), (total - total_error).clamp(min=0).sqrt()
        root_error = torch.maximum((total + total_error).sqrt() - root, root - low) + rounding * root
        move = update.lr * g / (root + self.eps)
        move_error = update.lr * (
            g_error / (low + self.eps) + g.abs() * root_error / ((low + self.eps) * (root + self.eps))
        )
        move_error = move_error + rounding * (weight.abs() + move.abs())
        steps = torch.full((), float(update.step + 1), dtype=torch.float64)
        return {
            "sum": (total, total_error),
            "step": (steps, torch.zeros((), dtype=torch.float64)),
            "param": (weight - move, move_error),
        }
