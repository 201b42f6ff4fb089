"""LAMB (You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", 2020)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from unisono.spec.training import Optimiser, UpdateSizes
from unisono.train.optim.adamw import AdamW
from unisono_contrib.train.optim._trust import Trusting

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Lamb(Trusting, AdamW):
    """AdamW; the step of each matrix, with its decay, is scaled to the matrix' norm times the learning rate."""

    name: ClassVar[str] = "lamb"

    def plain(self) -> Optimiser:
        return AdamW(betas=self.betas, eps=self.eps)

    def bind(self, groups: Sequence[Mapping[str, Any]], lr: float, fused: bool) -> "torch.optim.Optimizer":
        from unisono_contrib.train.optim._trust_steps import LambSteps

        return LambSteps([dict(group) for group in groups], lr, self.betas, self.eps, self.trust_clip)

    def law(
        self,
        update: UpdateSizes,
        weight: "Tensor",
        state: "Mapping[str, Tensor]",
        grad: "Tensor",
        error: "Tensor",
    ) -> "dict[str, tuple[Tensor, Tensor]]":
        from unisono_contrib.train.optim._trust_laws import scaled_within

        kept, move, off = self.direction(update, state, grad, error)
        pull = update.decay * weight
        off = off + update.rounding * (move.abs() + pull.abs())
        moved, off = scaled_within(move + pull, off, float(weight.norm()), self.trust_clip, update.rounding)
        rounded = update.rounding * (weight.abs() + update.lr * moved.abs())
        return kept | {"param": (weight - update.lr * moved, update.lr * off + rounded)}
