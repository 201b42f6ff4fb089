"""Half a cosine from the peak down to the last rate (Loshchilov & Hutter, "SGDR", 2017)."""

import math
from typing import ClassVar

from unisono.spec.training import Decaying


class Cosine(Decaying):
    """Down along half a cosine: slow at both ends."""

    name: ClassVar[str] = "cosine"

    def after(self, done: float, lr: float) -> float:
        low = self.floor(lr)
        return low + (lr - low) * 0.5 * (1.0 + math.cos(math.pi * done))
