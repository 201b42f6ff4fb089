"""The peak, to the end."""

from typing import ClassVar

from unisono.spec.training import LearningRate


class Level(LearningRate):
    """The peak learning rate after the warm-up, to the end."""

    name: ClassVar[str] = "constant"

    def after(self, done: float, lr: float) -> float:
        return lr
