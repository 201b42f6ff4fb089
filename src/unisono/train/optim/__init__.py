"""Optimisers and learning-rate schedules: torch's, over the local tensors of this rank's slots."""

from unisono.train.optim.make import make, prime, set_rate
from unisono.train.optim.rate import rate

__all__ = ["make", "prime", "rate", "set_rate"]
