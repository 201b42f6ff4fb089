"""Cross-entropy with the targets, mixed with what a trained model gives the classes (Hinton et al., Distilling the
knowledge in a neural network, 2015)."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from unisono.spec.training import IGNORED, Loss, Positive, Teaching

if TYPE_CHECKING:
    from torch import Tensor


class Distil(Loss):
    """(1 - weight) × cross-entropy + weight × temperature² × KL(teacher, student), both of logits / temperature;
    validations are cross-entropy alone."""

    name: ClassVar[str] = "distil"
    main: ClassVar[str] = "teacher"

    teacher: str = Field(
        default="", description="a run's folder, or one of transformers, whose model teaches"
    )
    weight: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        default=0.5, description="what the teacher counts for, the targets count for the rest"
    )
    temperature: Positive = Field(default=2.0, description="by which all logits are divided")

    def bind(self) -> "Callable[[Tensor, Tensor], Tensor]":
        from torch.nn.functional import cross_entropy

        return lambda logits, targets: cross_entropy(
            logits.flatten(0, -2), targets.flatten(), reduction="sum", ignore_index=IGNORED
        )

    def teaching(self) -> Teaching:
        plain_loss, weight, temperature = self.bind(), self.weight, self.temperature

        def mixed(logits: "Tensor", theirs: "Tensor", targets: "Tensor") -> "Tensor":
            import torch

            wide = torch.promote_types(logits.dtype, torch.float32)
            student = (logits.to(wide) / temperature).log_softmax(-1)
            teacher = (theirs.to(wide) / temperature).log_softmax(-1)
            apart = (teacher.exp() * (teacher - student)).sum(-1)
            hints = apart.masked_fill(targets == IGNORED, 0.0).sum() * temperature**2
            return (1.0 - weight) * plain_loss(logits, targets) + weight * hints

        return Teaching(self.teacher, mixed)
