"""Adam whose second moment learns in some steps only, so that what crosses `dp` in the others may be coded.

Tang et al., "1-bit Adam" (2021): once squares of gradients have settled, Adam is descent along a first moment with a
rate for each element. So the first moment can be sent in few bits with error feedback, as gradients of plain descent
can: no error is squared. `codecs/_moments.py` has the coder's side.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from unisono.train.optim.adamw import AdamW

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class FrozenAdam(AdamW):
    """AdamW in steps whose gradient crosses whole; in all others the second moment stays as it is. Each moment is
    divided by what it has seen of its mean so far, so a frozen one goes on being divided by the same.

    No element moves further in a step than AdamW would have it (see `reach`). One of which a frozen second moment has
    seen next to nothing, such as those of a word that comes late, would otherwise be thrown out of the model.
    """

    apart: ClassVar[bool] = False
    squares: ClassVar[bool] = False

    @property
    def crossing(self) -> float:
        return self.betas[0]

    @property
    def reach(self) -> float:
        """Learning rates that AdamW moves an element at most. Both moments are sums over the same gradients, so by
        the inequality of Cauchy and Schwarz the first is no larger than this many roots of the second."""
        b1, b2 = self.betas
        return (1 - b1) / math.sqrt((1 - b2) * (1 - b1 * b1 / b2)) if b1 * b1 < b2 else math.inf

    @abstractmethod
    def whole_steps(self, step: int) -> int:
        """As `Optimiser.whole_steps`; step 0 is one of them. These are the steps in which the second moment learns."""

    def learnt(self, step: int) -> int:
        return self.whole_steps(step)

    def bind(self, groups: Sequence[Mapping[str, Any]], lr: float, fused: bool) -> "torch.optim.Optimizer":
        from unisono_contrib.train.optim._frozen_steps import FrozenSteps

        plain = [dict(group) for group in groups]
        return FrozenSteps(plain, lr, self.betas, self.eps, self.reach, self.whole_steps)

    def state(self, parameter: "Tensor") -> "dict[str, Tensor]":
        from unisono_contrib.train.optim._frozen_steps import first_state

        return first_state(parameter)
