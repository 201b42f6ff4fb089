"""Batch normalisation whose statistics are those of a leaf, and whose running ones do not depend on who saw it.

A forward normalises by its own micro-batch and writes down what that one had. After the step the running statistics
take the leaves in their order in the global batch, as one device would (`train/step/batch_norm.py`), so they are the
same on any number of ranks (Ioffe & Szegedy, "Batch normalization", 2015).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.models.noise import Noise


class LeafNorm(nn.Module):
    """One batch norm of a unit.

    names: of its running mean, running variance and counter in the unit, "" without one. seen: by micro-batch of this
    step, mean and variance [channels here]. part: (first channel here, how many).
    """

    def __init__(self, names: tuple[str, str, str], momentum: float, eps: float, channels: int) -> None:
        super().__init__()
        self.names, self.momentum, self.eps = names, momentum, eps
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}
        self.part: tuple[int, int] = (0, channels)

    def forward(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, noise: Noise | None
    ) -> Tensor:  # fmt: skip
        """x [B, C, ...]; mean, var: the running ones, which an evaluation uses."""
        if not self.training:
            return F.batch_norm(x, mean, var, weight, bias, False, self.momentum, self.eps)
        sums = torch.zeros_like(mean), torch.zeros_like(var)
        y = F.batch_norm(
            x, *sums, weight, bias, True, 1.0, self.eps
        )  # all of what this one has, nothing of before
        if noise is not None:
            self.seen[noise.micro] = sums
        return y
