"""Positions dealt over `cp`, and what lies on `tp` between blocks of those: who sees which of them is told, the inputs
and targets of a sample are sliced where they come in, and attention reaches what other ranks have."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from unisono.comm.group import Group
from unisono.models.moe.routing import LeafTokens
from unisono.models.noise import numbers
from unisono.parallel.attend import CONTEXT_WAYS, ContextWay
from unisono.parallel.attend.gather.live import Gathered
from unisono.parallel.cut import Stage
from unisono.parallel.online import OnlineCore
from unisono.parallel.pass_context import PassContext, Stages
from unisono.plan.grid import columns_of
from unisono.spec.errors import UsageError
from unisono.spec.layout import Places, Split
from unisono.spec.model import DealtSize


def deal_positions(stages: Stages, context: PassContext) -> None:
    """Tell the modules of this rank's stages which positions they see. Raises UsageError P12 where the model does not
    say how it attends, or its sizes cannot be dealt."""
    cp, tp, full = context.mesh.cp, context.mesh.tp, context.anatomy.sequence
    way = CONTEXT_WAYS.read(context.plan.cp_kind)
    if cp.size > 1:
        _check(way, context)
    mine = way.places(full, cp.index, cp.size)
    between = mine.dealt(tp.index, tp.size) if context.length else mine
    leaf = _leaf(way, context) if Split.ROUTER in context.anatomy.splits.values() else None
    sharers = _sharers(way, context) if any(block.whole for block in context.each) else None
    for stage in stages.values():
        for name, module in list(stage.named_modules()):
            split = context.anatomy.split_of(name)
            if sharers and context.whole(name):
                _whole(stage, name, split, sharers)
                continue
            if split is Split.POSITIONS:
                module.places = between  # type: ignore[assignment]
            elif split is Split.SEQUENCE_DROPOUT:
                module.places[1] = between  # type: ignore[index,union-attr]
            elif split is Split.ROTARY:
                module.places = mine  # type: ignore[assignment]
            elif split is Split.ROUTER:
                module.leaf = leaf  # type: ignore[assignment]
            elif split is Split.CORE and cp.size > 1:
                if way.by_heads:
                    heads = module.drop.places.get(1) or Places.whole(context.anatomy.divides["heads"])  # type: ignore[union-attr]
                    module.drop.places[1] = heads.dealt(cp.index, cp.size)  # type: ignore[index,union-attr]
                parent, _, child = name.rpartition(".")
                setattr(stage.get_submodule(parent), child, way.bind(module, cp, full))
        if cp.size > 1:
            stage.dealt = partial(_taken, numbers(mine, context.device))


def _whole(stage: Stage, name: str, split: Split | None, sharers: tuple[Group, list[Places]]) -> None:
    """Tell a module of a block whose weights tp leaves whole: it sees what lies on this rank between blocks, and keys
    and values of all ranks of cp and tp are gathered where it attends."""
    group, held = sharers
    mine, module = held[group.index], stage.get_submodule(name)
    if split is Split.SEQUENCE_DROPOUT:
        module.places[1] = mine  # type: ignore[index,union-attr]
    elif split is Split.ROTARY:
        module.places = mine  # type: ignore[assignment]
    elif split is Split.CORE:
        parent, _, leaf = name.rpartition(".")
        core = OnlineCore(module, Gathered(group), held, group.index)
        setattr(stage.get_submodule(parent), leaf, core)


class SlicedLeaf(LeafTokens):
    """A leaf whose positions are dealt over a group. held: the positions of each member, in the group's order."""

    def __init__(self, group: Group, held: Sequence[Places], device: torch.device) -> None:
        self.group, self.full, self.sizes = group, held[0].full, [places.size for places in held]
        self.mine = numbers(held[group.index], device)
        self.order = torch.cat([numbers(places, device) for places in held]).argsort()

    @torch.no_grad()
    def sum(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(x.clone())

    def tokens(self, x_Bt: Tensor) -> int:
        return x_Bt.shape[0] * self.full

    @torch.no_grad()
    def gather(self, x_Bt: Tensor) -> Tensor:
        x_tB, most = x_Bt.transpose(0, 1), max(self.sizes)
        lacking = x_tB.new_zeros((most - len(x_tB), *x_tB.shape[1:]))
        parts = self.group.all_gather(torch.cat((x_tB, lacking))).split(most)
        dealt = torch.cat([part[:size] for part, size in zip(parts, self.sizes, strict=True)])
        return dealt.index_select(0, self.order).transpose(0, 1).contiguous()

    def local(self, x_BT: Tensor) -> Tensor:
        return x_BT.index_select(1, self.mine)


def _leaf(way: ContextWay, context: PassContext) -> SlicedLeaf:
    """The leaf of this rank's routers, which all ranks of cp and tp share."""
    return SlicedLeaf(*_sharers(way, context), context.device)


def _sharers(way: ContextWay, context: PassContext) -> tuple[Group, list[Places]]:
    """The ranks of cp and tp, among whom a sample's positions lie between blocks, and those of each. All of them call
    it, or it hangs."""
    mesh, full = context.mesh, context.anatomy.sequence
    sizes = {"cp": mesh.cp.size, "tp": mesh.tp.size}
    group = mesh.over(frozenset(axis for axis, size in sizes.items() if size > 1))
    at = [mesh.shape.coordinates(mesh.members.ranks.index(rank)) for rank in group.ranks]
    return group, [
        way.places(full, a["cp"], sizes["cp"]).dealt(a["tp"], sizes["tp"] if context.length else 1)
        for a in at
    ]


def _taken(places: Tensor, x: Tensor) -> Tensor:
    """[B, T, ...] → [B, t, ...]."""
    return x.index_select(1, places)


def _check(way: ContextWay, context: PassContext) -> None:
    anatomy, plan = context.anatomy, context.plan
    if not anatomy.sequence or Split.CORE not in anatomy.splits.values():
        what = f"cp={plan.cp}: this model says nothing of positions, or of how it attends to them"
        raise UsageError(what, where="plan.cp, model.kind", fix=f"cp=1, and dp={plan.cp} instead", code="P12")
    heads = [
        DealtSize(f"the {name}", name, size) for name, size in anatomy.divides.items() if "heads" in name
    ]
    sizes = [DealtSize("the context", "context", anatomy.sequence), *heads]
    for problem in way.problems(plan.cp, columns_of(plan.tp), sizes):
        raise UsageError(problem.what, where=problem.where, fix=problem.fix, code=problem.code)
