"""Samples that must meet: rows of the global batch for what treats them together, and batch norms over it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from unisono.comm.group import Group
from unisono.library.current_batch import BatchShard, CurrentBatch
from unisono.library.modes import unwatched
from unisono.spec.errors import UsageError


def gather(x: Tensor, batch: BatchShard, group: Group) -> Tensor:
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
    def forward(ctx: Any, x: Tensor, batch: BatchShard, group: Group) -> Tensor:
        ctx.batch, ctx.group = batch, group
        parts = batch.parts(group.size)
        most = max(high - low for low, high in parts)
        room = x.new_zeros(most, *x.shape[1:])
        count = batch.high - batch.low
        room[:count] = x[:count]
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


class Joined:
    """The forward of one batch norm, over the group. A copy of the module has one of its own."""

    def __init__(self, module: _BatchNorm, group: Group, current_batch: CurrentBatch) -> None:
        self._module, self._group, self._batch = module, group, current_batch

    def __call__(self, x: Tensor) -> Tensor:
        return _forward(self._module, self._group, self._batch, x)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Joined":
        return Joined(memo.get(id(self._module), self._module), self._group, self._batch)


def join_batches(model: nn.Module, group: Group, current_batch: CurrentBatch) -> None:
    """Let the model's batch norms see the global batch. Modules, parameters and state_dict stay as they are."""
    for module in model.modules():
        if isinstance(module, _BatchNorm) and type(module).forward is _BatchNorm.forward:
            module.forward = Joined(module, group, current_batch)  # type: ignore[method-assign]


class _Sum(torch.autograd.Function):
    """The sum over ranks of x [n]; what comes back is the gradient of the weighted mean of the ranks' losses.

    Every rank's own gradients are multiplied by its share later on; those that come from others are not of its share.
    """

    @staticmethod
    @unwatched()
    def forward(ctx: Any, x: Tensor, group: Group, ratio: float) -> Tensor:
        ctx.group, ctx.ratio = group, ratio
        return group.all_reduce(x.clone())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        whole = ctx.group.all_reduce(grad * ctx.ratio)
        return whole / (ctx.ratio or 1.0), None, None


def _forward(module: _BatchNorm, group: Group, current_batch: CurrentBatch, x: Tensor) -> Tensor:
    module._check_input_dim(x)
    if not (module.training or module.running_mean is None):
        return _BatchNorm.forward(module, x)
    wide = x if x.dtype == torch.float64 else x.float()
    dims = [d for d in range(x.dim()) if d != 1]
    shape = [1, -1] + [1] * (x.dim() - 2)
    # A rank without samples computes on a borrowed one, which does not count.
    here = 1.0 if current_batch.ratio else 0.0
    values = here * x.numel() / x.shape[1]
    line = _Sum.apply(
        torch.cat([wide.sum(dims) * here, wide.new_full((1,), values)]), group, current_batch.ratio
    )
    count = line[-1].detach()
    if values <= 1 and count <= 1:  # as on one device; asked only where this rank could be all there is
        raise ValueError("batch normalisation needs more than one value a channel in training")
    mean = line[:-1] / count
    centred = wide - mean.view(shape)
    variance = _Sum.apply(centred.square().sum(dims) * here, group, current_batch.ratio) / count
    _remember(module, mean.detach(), variance.detach() * (count / (count - 1)))
    y = centred * (variance + module.eps).rsqrt().view(shape)
    if module.affine:
        y = y * module.weight.view(shape) + module.bias.view(shape)
    return y.to(x.dtype)


@torch.no_grad()
def _remember(module: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    if not (module.training and module.track_running_stats):
        return
    if module.running_mean is None or module.running_var is None or module.num_batches_tracked is None:
        return
    module.num_batches_tracked.add_(1)
    rate = module.momentum if module.momentum is not None else 1.0 / float(module.num_batches_tracked)
    module.running_mean.lerp_(mean.to(module.running_mean.dtype), rate)
    module.running_var.lerp_(variance.to(module.running_var.dtype), rate)
