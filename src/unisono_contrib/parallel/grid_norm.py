"""Normalisation over features that the ranks of a row deal out.

Shapes: b samples, T positions, d this rank's part of D features.
"""

import torch
from torch import Tensor

from unisono.comm.group import Group


class GridNormed(torch.autograd.Function):
    """x [b, T, d] → (x - mean) / deviation over all D features, or x / root of the mean square; the moments are sums
    over the group, two forward and one backward."""

    @staticmethod
    def forward(ctx, x, group, width, centred, eps):  # type: ignore[override]
        ctx.group, ctx.width, ctx.centred = group, width, centred
        if centred:
            x = x - group.all_reduce(x.sum(-1, keepdim=True)) / width
        scale = (group.all_reduce(x.square().sum(-1, keepdim=True)) / width + eps).rsqrt()
        y = x * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        y, scale = ctx.saved_tensors
        sums = ctx.group.all_reduce(torch.stack((grad.sum(-1), (grad * y).sum(-1)))) / ctx.width
        towards = grad - y * sums[1].unsqueeze(-1)
        if ctx.centred:
            towards = towards - sums[0].unsqueeze(-1)
        return towards * scale, None, None, None, None


def grid_norm(x: Tensor, group: Group, width: int, centred: bool, eps: float) -> Tensor:
    """In float32 where x has fewer digits, as torch's own norms under autocast."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    return GridNormed.apply(wide, group, width, centred, eps)  # type: ignore[return-value]
