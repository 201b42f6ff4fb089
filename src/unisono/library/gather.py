"""Rows of the global batch, for what treats its samples together."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unisono.comm.group import Group
from unisono.library.hand import DealtBatch
from unisono.library.modes import unwatched
from unisono.spec.errors import UsageError


def gather(x: Tensor, batch: DealtBatch, group: Group) -> Tensor:
    """x [samples here, ...] → [samples of the global batch, ...], the same on every rank; gradients flow back.

    Every rank then makes the loss that one device makes. Its gradient here counts this rank's rows alone, and
    gradients are averaged with the batch's ratio later on: so they are divided by it now.
    """
    if group.size == 1:
        return x
    if x.dim() == 0 or x.shape[0] != batch.samples:
        raise UsageError(
            f"a tensor of shape {list(x.shape)} for a batch of which {batch.samples} samples are here",
            where="job.gather",
            fix="dim 0 counts this rank's samples",
            code="J07",
        )
    return _Gather.apply(x, batch, group)


class _Gather(torch.autograd.Function):
    @staticmethod
    @unwatched()
    def forward(ctx: Any, x: Tensor, batch: DealtBatch, group: Group) -> Tensor:
        ctx.batch, ctx.group = batch, group
        parts = batch.parts(group.size)
        most = max(high - low for low, high in parts)
        room = x.new_zeros(most, *x.shape[1:])
        own = batch.high - batch.low
        room[:own] = x[:own]
        rows = group.all_gather(room.reshape(1, -1).contiguous().view(-1)).view(
            group.size, most, *x.shape[1:]
        )
        return torch.cat([rows[index, : high - low] for index, (low, high) in enumerate(parts)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        batch = ctx.batch
        if batch.borrowed:
            return grad.new_zeros(1, *grad.shape[1:]), None, None
        return grad[batch.low : batch.high] * (ctx.group.size / batch.ratio), None, None
