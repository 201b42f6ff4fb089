"""Running statistics of batch norms, over all leaves of a step in their order, whoever computed them."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from unisono.comm.mesh import Mesh
from unisono.models.batch_norm import LeafNorm
from unisono.models.cut_chain import GraphUnit
from unisono.parallelize import Local
from unisono.spec.errors import UsageError
from unisono.sync import Verdict
from unisono.train.step.numbers import Numbers
from unisono.train.step.update import Report, Update


@dataclass(frozen=True, slots=True)
class RunningNorm:
    """One batch norm of this rank. mean, var: the running ones, whole. counter: of its batches, None without one."""

    norm: LeafNorm
    mean: Tensor
    var: Tensor
    counter: Tensor | None


@dataclass(kw_only=True)
class NormedUpdate(Update):
    """An update after which batch norms have seen the step. norms: of this rank. leaves: those that it computes, of so
    many of a step."""

    norms: Sequence[RunningNorm]
    mesh: Mesh
    leaves: range
    of_leaves: int

    @torch.no_grad()
    def __call__(self, step: int, verdict: Verdict, numbers: Numbers) -> Report:
        """As any update's. Every rank calls it, or it hangs."""
        report = super().__call__(step, verdict, numbers)
        each = [self._seen(one) for one in self.norms]
        told = torch.cat([x.flatten(1) for x in each], 1)
        for group in (self.mesh.dp, self.mesh.shard, self.mesh.tp):
            told = group.all_reduce(told) if group.size > 1 else told
        for one, rows in zip(self.norms, told.split([x[0].numel() for x in each], 1), strict=True):
            mean, var, times = rows.unflatten(1, (3, -1)).unbind(1)
            if report.verdict is Verdict.APPLY:
                _follow(one, mean / times, var / times)
            one.norm.seen.clear()
        return report

    def _seen(self, one: RunningNorm) -> Tensor:
        """What each leaf of this rank had, zeros for those of others: [leaves, (mean, variance, 1), channels]."""
        seen = one.mean.new_zeros((self.of_leaves, 3, len(one.mean)))
        start, size = one.norm.part
        first = size < len(one.mean) or self.mesh.tp.index == 0  # of those that have the same
        for micro, (mean, var) in one.norm.seen.items() if first else ():
            seen[self.leaves[micro], :, start : start + size] = torch.stack(
                (mean, var, torch.ones_like(mean))
            )
        return seen


def _follow(one: RunningNorm, means: Tensor, variances: Tensor) -> None:
    """Take the leaves in their order."""
    share = one.norm.momentum
    for mean, var in zip(means, variances, strict=True):
        one.mean.mul_(1 - share).add_(mean, alpha=share)
        one.var.mul_(1 - share).add_(var, alpha=share)
    if one.counter is not None:
        one.counter.add_(len(means))


def normed(update: Update, local: Local, mesh: Mesh, leaves: range, of_leaves: int, flushed: bool) -> Update:
    """`update` itself where no stage of this rank has a batch norm. flushed: steps end one after the other. Raises
    UsageError P24 where a step has no end, or two copies of a stage see a part of its leaves each."""
    norms = [
        RunningNorm(module, *(_buffer(unit, name) for name in module.names))  # type: ignore[arg-type]
        for stage in local.stages.values()
        for unit in stage.modules()
        if isinstance(unit, GraphUnit)
        for module in unit.children()
        if isinstance(module, LeafNorm)
    ]
    if not norms:
        return update
    if not flushed or max(local.stages) >= len(local.blocks):
        name = norms[0].norm.names[0]
        what = f"running statistics of batch norms, such as {name}, take all leaves of a step in their order"
        fix = "schedule=1f1b, or group norms"
        raise UsageError(what, where="plan.schedule, model.kind", fix=fix, code="P24")
    plain = {one.name: getattr(update, one.name) for one in fields(update)}
    return NormedUpdate(**plain, norms=norms, mesh=mesh, leaves=leaves, of_leaves=of_leaves)


def _buffer(unit: GraphUnit, name: str) -> Tensor | None:
    return unit.get_buffer(name) if name else None
