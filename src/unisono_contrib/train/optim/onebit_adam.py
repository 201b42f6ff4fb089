"""1-bit Adam (Tang et al., "1-bit Adam: communication efficient large-scale training with Adam's convergence speed",
2021)."""

from typing import ClassVar

from pydantic import Field

from unisono.spec.training import Count
from unisono_contrib.train.optim._frozen import FrozenAdam


class OneBitAdam(FrozenAdam):
    """AdamW for some steps; then its second moment is frozen, and the first one is what codecs on dp are given."""

    name: ClassVar[str] = "onebit_adam"

    variance_steps: Count = Field(
        default=100,
        description="onebit_adam: first steps, whose gradients cross whole; in the paper a sixth of the run",
    )

    def whole_steps(self, step: int) -> int:
        return min(step, self.variance_steps)
