"""Running statistics of batch norms, over all leaves of a step in their order, whoever computed them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unisono.comm.mesh import Mesh
from unisono.models.batch_norm import LeafNorm
from unisono.models.cut_chain import GraphUnit
from unisono.parallelize import Local
from unisono.spec.errors import UsageError
from unisono.sync import Verdict


@dataclass(frozen=True, slots=True)
class RunningNorm:
    """One batch norm of this rank. mean, var: the running ones, whole. counter: of its batches, None without one."""

    norm: LeafNorm
    mean: Tensor
    var: Tensor
    counter: Tensor | None


@dataclass(frozen=True, slots=True)
class RunningNorms:
    """After an update batch norms have seen the step. norms: of this rank. leaves(): the numbers of the micro-batches
    that this rank computed, of `of_leaves()` in the step."""

    norms: Sequence[RunningNorm]
    mesh: Mesh
    leaves: Callable[[], range]
    of_leaves: Callable[[], int]

    @torch.no_grad()
    def __call__(self, verdict: Verdict) -> Mapping[str, Any]:
        """Every rank calls it, or it hangs."""
        seen = [self._seen(norm) for norm in self.norms]
        sums = torch.cat([x.flatten(1) for x in seen], 1)
        for group in (self.mesh.dp, self.mesh.shard, self.mesh.tp):
            sums = group.all_reduce(sums) if group.size > 1 else sums
        for norm, rows in zip(self.norms, sums.split([x[0].numel() for x in seen], 1), strict=True):
            mean, var, times = rows.unflatten(1, (3, -1)).unbind(1)
            if verdict is Verdict.APPLY:
                _follow(norm, mean / times, var / times)
            norm.norm.seen.clear()
        return {}

    def _seen(self, running: RunningNorm) -> Tensor:
        """What each leaf of this rank had, zeros for those of others: [leaves, (mean, variance, 1), channels]."""
        seen = running.mean.new_zeros((self.of_leaves(), 3, len(running.mean)))
        start, size = running.norm.part
        leaves = self.leaves()
        first = size < len(running.mean) or self.mesh.tp.index == 0  # of those that have the same
        for micro, (mean, var) in running.norm.seen.items() if first else ():
            numbers = torch.stack((mean, var, torch.ones_like(mean)))
            seen[leaves[micro], :, start : start + size] = numbers
        return seen


def _follow(running: RunningNorm, means: Tensor, variances: Tensor) -> None:
    """Take the leaves in their order."""
    share = running.norm.momentum
    for mean, var in zip(means, variances, strict=True):
        running.mean.mul_(1 - share).add_(mean, alpha=share)
        running.var.mul_(1 - share).add_(var, alpha=share)
    if running.counter is not None:
        running.counter.add_(len(means))


def running_norms(
    local: Local, mesh: Mesh, leaves: Callable[[], range], of_leaves: Callable[[], int], flushed: bool
) -> tuple[RunningNorms, ...]:
    """What batch norms do after an update; nothing where no stage of this rank has one. flushed: steps end one after
    the other. Raises UsageError P24 where a step has no end, or two copies of a stage see a part of its leaves each."""
    norms = [
        RunningNorm(module, *(_buffer(unit, name) for name in module.names))  # type: ignore[arg-type]
        for stage in local.stages.values()
        for unit in stage.modules()
        if isinstance(unit, GraphUnit)
        for module in unit.children()
        if isinstance(module, LeafNorm)
    ]
    if not norms:
        return ()
    if not flushed or max(local.stages) >= len(local.blocks):
        name = norms[0].norm.names[0]
        what = f"running statistics of batch norms, such as {name}, take all leaves of a step in their order"
        fix = "schedule=1f1b, or group norms"
        raise UsageError(what, where="plan.schedule, model.kind", fix=fix, code="P24")
    return (RunningNorms(norms, mesh, leaves, of_leaves),)


def _buffer(unit: GraphUnit, name: str) -> Tensor | None:
    return unit.get_buffer(name) if name else None


def changed_buffers(stage: nn.Module, routers: Mapping[str, int]) -> dict[str, Tensor]:
    """By name, buffers of a stage that a step changes: running statistics of batch norms, votes of routers."""
    written = {
        f"{name}.{buffer}"
        for name, module in stage.named_modules()
        if isinstance(module, GraphUnit)
        for buffer in module.written
    }
    return {
        name: x for name, x in stage.named_buffers() if name.rpartition(".")[0] in routers or name in written
    }
