"""LANS (Zheng et al., "Accelerated large batch optimization of BERT pretraining in 54 minutes", 2020)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from unisono.spec.training import UpdateSizes
from unisono_contrib.train.optim.lamb import Lamb

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Lans(Lamb):
    """LAMB of gradients that are divided by their norms, with Nesterov's step: a part of it goes along the gradient."""

    name: ClassVar[str] = "lans"

    def bind(self, groups: Sequence[Mapping[str, Any]], lr: float, fused: bool) -> "torch.optim.Optimizer":
        from unisono_contrib.train.optim._trust_steps import LansSteps

        return LansSteps([dict(group) for group in groups], lr, self.betas, self.eps, self.trust_clip)

    def law(
        self,
        update: UpdateSizes,
        weight: "Tensor",
        state: "Mapping[str, Tensor]",
        grad: "Tensor",
        error: "Tensor",
    ) -> "dict[str, tuple[Tensor, Tensor]]":
        from unisono_contrib.train.optim._trust_laws import scaled_within

        rounding, norm, share = update.rounding, float(weight.norm()), self.betas[0]
        unit = scaled_within(grad, error, 1.0, None, rounding)
        kept, *along_moment = self.direction(update, state, *unit)
        along_grad = self.quotient(update, unit, kept["exp_avg_sq"])
        pull, after, most = update.decay * weight, weight, rounding * weight.abs()
        for part, (move, off) in ((share, along_moment), (1 - share, along_grad)):
            off = off + rounding * (move.abs() + pull.abs())
            moved, off = scaled_within(move + pull, off, norm, self.trust_clip, rounding)
            after = after - update.lr * part * moved
            most = most + update.lr * part * (off + rounding * moved.abs())
        return kept | {"param": (after, most)}
