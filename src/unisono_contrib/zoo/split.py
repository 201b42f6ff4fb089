"""A layer whose columns, and the next one whose rows, lie on different ranks (Megatron-LM, 1909.08053), cut by hand."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn.functional import cross_entropy, gelu, linear

from unisono import gradients_of
from unisono_contrib.zoo.toys import Gradients, batch, summed

LAYOUT = {"up": Shard(0), "down": Shard(1)}


class CopyToRanks(torch.autograd.Function):
    """Forward as it is, backward summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return summed(grad)


class SumOverRanks(torch.autograd.Function):
    """Forward summed over ranks, backward as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return summed(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def piece(x: Tensor, rank: Any, dim: int) -> nn.Parameter:
    """Return this rank's piece of a weight that is cut along `dim`."""
    return nn.Parameter(x.chunk(rank.world, dim)[rank.rank].detach().clone())


class SplitLayers(nn.Module):
    """An inner layer that each rank has whole, and behind it two that are cut; whole without a rank.

    share(bias, tp) is what a rank adds before outputs are summed. copy: what enters the cut layers.
    """

    def __init__(self, rank: Any = None, share: Any = None, copy: Any = None) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.rank, self.share, self.copy = rank, share, copy
        self.inner = nn.Linear(6, 8)
        up, down = torch.randn(16, 8) / 3, torch.randn(4, 16) / 4
        self.up = nn.Parameter(up) if rank is None else piece(up, rank, 0)
        self.down = nn.Parameter(down) if rank is None else piece(down, rank, 1)
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x).tanh()
        if self.rank is None:
            return linear(gelu(linear(h, self.up)), self.down, self.bias)
        outputs = linear(gelu(linear(self.copy(h), self.up)), self.down)
        return SumOverRanks.apply(outputs + self.share(self.bias, self.rank.world))


def share_of_bias(bias: Tensor, tp: int) -> Tensor:
    """Return bias / tp, with the gradient of the whole bias."""
    return bias + (bias / tp - bias).detach()


def whole_layers() -> Gradients:
    """Return the gradients of one device."""
    return _gradients(SplitLayers())


def split_layers(rank: Any, share: Any = share_of_bias, copy: Any = CopyToRanks.apply) -> Gradients:
    """Return the gradients of this rank, which sees the same samples as the others."""
    return _gradients(SplitLayers(rank, share, copy))


def _gradients(model: nn.Module) -> Gradients:
    x, y = batch()
    cross_entropy(model(x[0, 0]), y[0, 0]).backward()
    return gradients_of(model)
