"""Expert parallelism: `ep` deals experts to ranks that a replica has already, and tokens travel to them and back.

The ranks of shard · cp · tp are numbered as the mesh numbers them, tp fastest, and `ep` takes as many neighbours of
them as it says. Where it is smaller than tp, the rest of tp cuts the width of each expert: those ranks gather their
tokens first and add up what they have made (Shoeybi et al., 2019). Where it is larger, it reaches over cp and shard:
then a rank's experts see tokens of several micro-batches, and other ranks of the replica hold the same ones as often as
`ep` fits into shard · cp · tp.

Experts that are dealt over `shard` stay outside of FSDP, since no two shards hold the same ones: ranks that do hold
the same ones keep them whole and add up their gradients (`Slot.sum_over`). Other experts are sharded as all else is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono.comm.group import Group
from unisono.comm.mesh import Mesh
from unisono.models.moe.dispatch import Dispatch, ExpertStack, sizes_of
from unisono.models.moe.routing import TokenChoice
from unisono.parallel.parts import Cut, Dealt, ends_of, part_of
from unisono.parallel.pass_context import PassContext, Stages
from unisono.parallel.tensor import Crossing, enter, gather_sequence, leave, scatter_sum
from unisono.spec.layout import Split

HOLDERS, SHARERS = "experts", "expert"
"""Names of groups in `Slot.sum_over`: of ranks that hold the same parts of experts; of all that hold the same experts,
whichever parts."""


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Groups of one rank. ep: who hold all experts together, one part each. width: who cut the same experts by width.
    holders, sharers: see `HOLDERS`. over_shard: whether ranks of `shard` hold different experts."""

    ep: Group
    width: Group
    holders: Group
    sharers: Group
    over_shard: bool


def expert_groups(mesh: Mesh, ep: int) -> ExpertGroups:
    """Every rank of the mesh calls it, or it hangs."""
    inner, tp = mesh.shape.cp * mesh.shape.tp, mesh.shape.tp
    # FSDP over shard and cp together would add up the gradients of different experts.
    over_shard = inner % ep > 0 or mesh.states is not mesh.shard
    axes = ("shard", "cp", "tp") if over_shard else ("cp", "tp")
    ranks = mesh.peers(axes)  # by place: tp fastest
    width = max(1, tp // ep)  # ranks to an expert
    at = ranks.index(mesh.rank)

    def part(place: int) -> tuple[int, int, int]:
        """(which time all experts are held, which part of the experts, which part of their width)."""
        among, slot = divmod(place, ep * width)
        return among, *divmod(slot, width)

    mine = part(at)

    def alike(*fields: int) -> list[int]:
        return [rank for i, rank in enumerate(ranks) if all(part(i)[f] == mine[f] for f in fields)]

    def group_of(name: str, peers: list[int]) -> Group:
        return mesh.group_of(name, sorted(peers))  # as torch orders them

    holders = group_of(HOLDERS, alike(1, 2))
    sharers = group_of(SHARERS, alike(1)) if width > 1 else holders
    groups = ExpertGroups(
        group_of("ep", alike(0, 2)),
        group_of("cut" if ep > 1 else "tp", alike(0, 1)),
        holders,
        sharers,
        over_shard,
    )
    for name, group in ((HOLDERS, holders), (SHARERS, sharers), ("ep", groups.ep), ("cut", groups.width)):
        mesh.keep(frozenset({name}), group)
    return groups


def exchange_rows(x: Tensor, to: Sequence[int], come: Sequence[int], group: Group) -> Tensor:
    """x [sum(to), ...], to[i] rows for member i in turn → [sum(come), ...], come[i] rows of member i in turn.

    Every member calls it, or it hangs.
    """
    if group.pg is None:
        return x
    x = x.contiguous()
    out = x.new_empty((sum(come), *x.shape[1:]))
    nbytes = (x.shape[0] - to[group.index]) * x.element_size() * (x[:1].numel() or 1 if len(x) else 0)
    group.recorder.count(group.axis, "all_to_all", nbytes)
    with group.recorder.span("comm", axis=group.axis, op="all_to_all", exposed=True, bytes=nbytes):
        dist.all_to_all_single(out, x, list(come), list(to), group=group.pg)
    return out


class RowsAcross(torch.autograd.Function):
    """RowsAcross to the ranks that compute on them; gradients come back the same way."""

    @staticmethod
    def forward(ctx, x_MD, to, come, group):  # type: ignore[override]
        ctx.way = come, to, group
        return exchange_rows(x_MD, to, come, group)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return exchange_rows(grad, *ctx.way), None, None, None


class DealtDispatch(Dispatch):
    """Experts are on the ranks of `ep`; those of `width` share each of them, and have `length` positions together."""

    def __init__(self, groups: ExpertGroups, length: int) -> None:
        super().__init__()
        self.groups, self.length = groups, length

    def forward(self, x_BtD: Tensor, choice: TokenChoice, experts: ExpertStack) -> Tensor:
        width = self.groups.width
        if width.size == 1:
            return super().forward(x_BtD, choice, experts)
        length = self.length
        expert, kept = (gather_sequence(x, width, length) for x in (choice.expert, choice.kept))
        weight = choice.weight
        gather = partial(gather_sequence, length=length)
        weight = Crossing.apply(weight, width, gather, scatter_sum, weight.dtype)
        y_BTD = super().forward(enter(x_BtD, width, length), TokenChoice(expert, weight, kept), experts)  # type: ignore[arg-type]
        return leave(y_BTD, width, length)

    def compute(self, x_MD: Tensor, expert_M: Tensor, experts: ExpertStack) -> Tensor:
        ep = self.groups.ep
        if ep.size == 1:
            return super().compute(x_MD, expert_M, experts)
        count = len(experts.up)
        if x_MD.is_meta:
            return self._rehearsed(x_MD, expert_M, experts)
        counts = torch.bincount(expert_M, minlength=count * ep.size)
        coming, pending = ep.start_exchange(counts)
        pending.wait()
        to, come = counts.view(ep.size, count).sum(1).tolist(), coming.sum(1).tolist()
        rows: Tensor = RowsAcross.apply(x_MD, to, come, ep)  # type: ignore[assignment]
        # what comes lies by rank, then by expert
        order = torch.arange(count, device=rows.device).repeat(ep.size).repeat_interleave(coming.flatten())
        order = order.argsort(stable=True)
        back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
        y = experts(rows[order], coming.sum(0).tolist())[back]
        return RowsAcross.apply(y, come, to, ep)  # type: ignore[return-value]

    def _rehearsed(self, x_MD: Tensor, expert_M: Tensor, experts: ExpertStack) -> Tensor:
        """Dispatch without numbers: experts are alike in load, and as much comes as goes."""
        ep, count = self.groups.ep, len(experts.up)
        ep.start_exchange(torch.empty(count * ep.size, dtype=torch.int64, device="meta"))[1].wait()
        to = sizes_of(expert_M, ep.size)
        rows: Tensor = RowsAcross.apply(x_MD, to, to, ep)  # type: ignore[assignment]
        return RowsAcross.apply(experts(rows, sizes_of(expert_M, count)), to, to, ep)  # type: ignore[return-value]


def deal_experts(stages: Stages, context: PassContext) -> None:
    """Leave this rank its experts, or its part of their width."""
    groups = expert_groups(context.mesh, context.plan.ep)
    ends, first = ends_of(context.length, context.mesh.tp.size), context.mesh.tp.index - groups.width.index
    together = ends[first + groups.width.size] - ends[first]
    for stage in stages.values():
        for name, module in list(stage.named_modules()):
            split = context.anatomy.split_of(name)
            if split is Split.EXPERTS:
                stage.get_submodule(name.rpartition(".")[0]).dispatch = DealtDispatch(groups, together)
                _cut(name, module, groups, context)  # type: ignore[arg-type]


def _cut(name: str, experts: ExpertStack, groups: ExpertGroups, context: PassContext) -> None:
    ep, width, full = groups.ep, groups.width, len(experts.up)
    first, count = part_of(full, ep)
    start, size = part_of(experts.full_width, width)
    experts.bias_from, experts.adds_bias = start, width.index == 0
    for key, whole in list(experts.named_parameters(recurse=False)):
        flat = whole.dim() == 1
        each = whole.shape[0] // full if flat else 1
        cuts = [Cut(0, first * each, count * each, full * each)] if ep.size > 1 else []
        if width.size > 1 and not flat:
            cuts.append(Cut(2 if key == "down" else 1, start, size, experts.full_width))
        value = whole.detach()
        for cut in cuts:
            value = value.narrow(cut.dim, cut.start, cut.size)
        parameter = nn.Parameter(value.clone(), requires_grad=whole.requires_grad)
        setattr(experts, key, parameter)
        context.dealt[f"{name}.{key}"] = Dealt(
            tuple(cuts),
            groups.over_shard,
            SHARERS if flat and width.size > 1 else HOLDERS,
            groups.sharers if flat else groups.holders,
        )
