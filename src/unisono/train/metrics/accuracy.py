"""How often the likeliest class is the right one."""

from typing import TYPE_CHECKING, ClassVar

from unisono.spec.training import Metric

if TYPE_CHECKING:
    from torch import Tensor


class Accuracy(Metric):
    """Share of the targets to which the model gives the greatest probability."""

    name: ClassVar[str] = "accuracy"

    def count(self, logits: "Tensor", targets: "Tensor") -> "Tensor":
        return (logits.argmax(-1) == targets).sum()

    def value(self, mean: float, loss: float) -> float:
        return mean
