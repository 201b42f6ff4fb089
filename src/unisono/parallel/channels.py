"""Convolutions under `tp`: channels are dealt as features are, and the norm between two of them by whole groups."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from unisono.comm.group import Group
from unisono.parallel.parts import Cut, features_of
from unisono.spec.layout import Units


def product_of(whole: nn.Linear | nn.Conv2d) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """(input, weight, bias) → what the module makes of them, with part of its features too."""
    if isinstance(whole, nn.Conv2d):
        return partial(F.conv2d, stride=whole.stride, padding=whole.padding, dilation=whole.dilation)  # type: ignore[arg-type]
    return F.linear


class DealtNorm(nn.GroupNorm):
    """A group norm of some of the groups: each has its channels here, so nothing is asked of other ranks."""

    def __init__(self, whole: nn.GroupNorm, group: Group, length: int, units: Units) -> None:
        start, size = features_of(units, group)
        super().__init__(size // units.width, size, whole.eps, whole.affine)
        self.weight = nn.Parameter(whole.weight.detach()[start : start + size].clone())
        self.bias = nn.Parameter(whole.bias.detach()[start : start + size].clone())
        self.cuts = dict.fromkeys(("weight", "bias"), Cut(0, start, size, whole.num_channels))
