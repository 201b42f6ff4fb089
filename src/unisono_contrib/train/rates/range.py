"""The learning-rate range test (Smith, Cyclical learning rates for training neural networks, 2017)."""

from typing import ClassVar

from pydantic import Field

from unisono.spec.training import LearningRate, Positive


class RangeTest(LearningRate):
    """Up from first_lr to lr, each step by the same factor: a test of rates, not a schedule to train by."""

    name: ClassVar[str] = "range"

    first_lr: Positive = Field(
        default=1e-6, description="learning rate of the first step of lr_schedule=range"
    )

    def after(self, done: float, lr: float) -> float:
        return self.first_lr * (lr / self.first_lr) ** done if lr else 0.0
