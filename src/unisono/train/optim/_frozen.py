"""Adam whose second moment learns in some steps only, so that what crosses `dp` in the others may be coded.

Tang et al., "1-bit Adam" (2021): once squares of gradients have settled, Adam is descent along a first moment with a
rate for each element. So the first moment can be sent in few bits with error feedback, as gradients of plain descent
can: no error is squared. `codecs/_moments.py` has the coder's side.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from unisono.spec.training import Optimiser, Positive, Share, UpdateSizes

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class FrozenAdam(Optimiser):
    """AdamW in steps whose gradient crosses whole; in all others the second moment stays as it is. Each moment is
    divided by what it has seen of its mean so far, so a frozen one goes on being divided by the same.

    No element moves further in a step than AdamW would have it (see `reach`). One of which a frozen second moment has
    seen next to nothing, such as those of a word that comes late, would otherwise be thrown out of the model.
    """

    betas: tuple[Share, Share] = Field(
        default=(0.9, 0.95), description="adamw, onebit_adam, zeroone_adam: decay of the two moments"
    )
    eps: Positive = Field(default=1e-8, description="added to the root of the squares, not for sgd")

    @property
    def kept(self) -> int:
        return 2

    @property
    def crossing(self) -> float:
        return self.betas[0]

    @property
    def reach(self) -> float:
        """Learning rates by which AdamW moves an element at most. Both moments are sums over the same gradients, so by
        the inequality of Cauchy and Schwarz the first is no larger than this many roots of the second."""
        b1, b2 = self.betas
        return (1 - b1) / math.sqrt((1 - b2) * (1 - b1 * b1 / b2)) if b1 * b1 < b2 else math.inf

    @abstractmethod
    def whole_steps(self, step: int) -> int:
        """As `Optimiser.whole_steps`; step 0 is one of them. These are the steps in which the second moment learns."""

    def bind(self, groups: Sequence[Mapping[str, Any]], lr: float, fused: bool) -> "torch.optim.Optimizer":
        from unisono.train.optim._frozen_steps import FrozenSteps

        plain = [dict(group) for group in groups]
        return FrozenSteps(plain, lr, self.betas, self.eps, self.reach, self.whole_steps)

    def state(self, parameter: "Tensor") -> "dict[str, Tensor]":
        from unisono.train.optim._frozen_steps import first_state

        return first_state(parameter)

    def law(
        self,
        update: UpdateSizes,
        weight: "Tensor",
        state: "Mapping[str, Tensor]",
        grad: "Tensor",
        error: "Tensor",
    ) -> "dict[str, tuple[Tensor, Tensor]]":
        """The quotient is bounded with the least denominator that the error allows; a frozen moment has no error."""
        import torch

        g, (b1, b2), t, rounding = grad, self.betas, update.step + 1, update.rounding
        m, v = state["exp_avg"], state["exp_avg_sq"]
        m1, m1_size = b1 * m + (1 - b1) * g, b1 * m.abs() + (1 - b1) * g.abs()
        m_error = (1 - b1) * error + rounding * m1_size
        v1, v_error = v, torch.zeros_like(v)
        learnt = self.whole_steps(t)
        if learnt > self.whole_steps(update.step):
            v1 = b2 * v + (1 - b2) * g * g
            v_error = (1 - b2) * (2 * g.abs() * error + error * error) + rounding * v1
            v_error = v_error + torch.finfo(torch.float32).tiny
        scale = math.sqrt(1 - b2**learnt)
        root, low, high = v1.sqrt(), (v1 - v_error).clamp(min=0).sqrt(), (v1 + v_error).sqrt()
        below, least = root / scale + self.eps, low / scale + self.eps
        below_error = torch.maximum(high - root, root - low) / scale + rounding * below
        rate, most = 1 / (1 - b1**t), self.reach
        move = update.lr * (rate * m1 / below).clamp(-most, most)
        move_error = m_error / least + m1.abs() * below_error / (least * below)
        move_error = update.lr * (rate * move_error).clamp(max=2 * most) + rounding * move.abs()
        left = weight * (1 - update.lr * update.decay)
        return {
            "exp_avg": (m1, m_error),
            "exp_avg_sq": (v1, v_error),
            "step": (torch.full((), float(t), dtype=torch.float64), torch.zeros((), dtype=torch.float64)),
            "param": (left - move, move_error + rounding * (weight.abs() + move.abs())),
        }
