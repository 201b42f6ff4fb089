"""Cross-entropy between the model's distribution and the targets."""

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from unisono.spec.training import Loss, Share

if TYPE_CHECKING:
    from torch import Tensor


class CrossEntropy(Loss):
    """Cross-entropy in nats; with smoothing, the targets share some of their weight with all classes evenly."""

    name: ClassVar[str] = "cross_entropy"
    main: ClassVar[str] = "smoothing"

    smoothing: Share = Field(
        default=0.0, description="weight that a target gives away (Szegedy et al., 2016)"
    )

    def bind(self) -> "Callable[[Tensor, Tensor], Tensor]":
        from torch.nn.functional import cross_entropy

        def summed(logits: "Tensor", targets: "Tensor") -> "Tensor":
            rows, classes = logits.flatten(0, -2), targets.flatten()
            return cross_entropy(rows, classes, reduction="sum", label_smoothing=self.smoothing)

        return summed
