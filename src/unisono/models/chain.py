"""What the house expects of a model: a stem, blocks and a head, one after the other, and a summed loss."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from unisono.models.noise import Noise
from unisono.spec.layout import Anatomy


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats, summed over all targets; logits [..., V], targets int64 [...]."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


class Chain(nn.Module):
    """`forward(inputs [B, ...], noise) → logits [B, ..., V]`. anatomy: what may be cut, and where."""

    def __init__(self, stem: nn.Module, blocks: nn.ModuleList, head: nn.Module, anatomy: Anatomy) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = stem, blocks, head
        self.anatomy = anatomy
        self.loss: Callable[[Tensor, Tensor], Tensor] = summed_cross_entropy

    def forward(self, inputs: Tensor, noise: Noise | None = None) -> Tensor:
        x = self.stem(inputs, noise)
        for block in self.blocks:
            x = block(x, noise)
        return self.head(x)
