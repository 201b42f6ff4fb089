"""A loss to which some targets do not count, so that micro-batches have unequal numbers of those that do:

    unisono verify examples/proof.toml --all --train.loss examples/padding.py:Padded:token=32

It is divided by all targets of the global batch, as every loss is; so its weights do not depend on the plan.
"""

from typing import ClassVar

import torch
from pydantic import Field
from torch.nn.functional import cross_entropy

from unisono.spec.training import Loss


class Padded(Loss):
    """Cross-entropy of the targets that are not padding."""

    name: ClassVar[str] = "padded"
    main: ClassVar[str] = "token"

    token: int = Field(default=0, description="the target that does not count")

    def bind(self):
        """Logits [..., classes] and targets [...] to nats, summed."""

        def summed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            rows, classes = logits.flatten(0, -2), targets.flatten()
            return cross_entropy(rows, classes, reduction="sum", ignore_index=self.token)

        return summed
