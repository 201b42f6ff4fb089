"""A straight line from the peak down to the last rate."""

from typing import ClassVar

from unisono.spec.training import Decaying


class Straight(Decaying):
    """Down along a straight line."""

    name: ClassVar[str] = "linear"

    def after(self, done: float, lr: float) -> float:
        return lr + (self.floor(lr) - lr) * done
