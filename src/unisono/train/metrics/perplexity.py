"""The loss as a number of equally likely choices."""

import math
from typing import ClassVar

from unisono.spec.training import Metric


class Perplexity(Metric):
    """e to the mean loss: among so many equally likely classes the model would be as uncertain."""

    name: ClassVar[str] = "perplexity"

    def value(self, mean: float, loss: float) -> float:
        return math.exp(min(loss, 700.0))  # beyond it, floats end
