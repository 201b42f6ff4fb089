"""Tensor parallelism with sequence parallelism between blocks (Shoeybi et al., 2019; Korthikanti et al., 2022).

Own modules instead of DTensor: plain local tensors compose with FSDP2 and with one gradient norm over the whole
model, take uneven vocabularies, and draw the same dropout mask as one device (see docs/adr/0004).

No size need be a multiple of the degree: heads, widths, vocabulary and positions are dealt as evenly as may be.

Shapes: B batch, T positions, t those of this rank, D width, V vocabulary, v this rank's part of V.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.comm.device import casting
from unisono.comm.group import Group
from unisono.parallel.chunks import Chunks, column_product, row_product
from unisono.parallel.heads import dealt_heads, with_lent_keys
from unisono.parallel.parts import Cut, ends_of, features_of, longest, part_of
from unisono.spec.errors import UsageError
from unisono.spec.layout import Anatomy, Places, Split, Units
from unisono.spec.training import IGNORED

if TYPE_CHECKING:
    from unisono.parallel.pass_context import PassContext, Stages


# How activations cross the group ---------------------------------------------------------------------------


def gather_dealt(x: Tensor, group: Group, ends: list[int]) -> Tensor:
    """Parts of dim 0, where `ends` says → all of it. Shorter parts travel with rows of zeros behind."""
    most = longest(ends)
    if most * group.size == ends[-1]:
        return group.all_gather(x)
    room = x.new_zeros((most, *x.shape[1:]))
    room[: len(x)] = x
    parts = group.all_gather(room).split(most)
    return torch.cat([part[: b - a] for part, (a, b) in zip(parts, pairwise(ends), strict=True)])


def scatter_dealt(x: Tensor, group: Group, ends: list[int]) -> Tensor:
    """All of dim 0, partial on every rank → this rank's part, summed. Shorter parts travel with rows of zeros."""
    most, length = longest(ends), ends[group.index + 1] - ends[group.index]
    if most * group.size == ends[-1]:
        return group.reduce_scatter(x)
    room = x.new_zeros((group.size, most, *x.shape[1:]))
    for part, (a, b) in zip(room, pairwise(ends), strict=True):
        part[: b - a] = x[a:b]
    return group.reduce_scatter(room.flatten(0, 1))[:length]


def gather_sequence(x_BtD: Tensor, group: Group, length: int) -> Tensor:
    """[B, t, D] → [B, T, D], T = length."""
    ends = ends_of(length, group.size)
    return gather_dealt(x_BtD.transpose(0, 1), group, ends).transpose(0, 1).contiguous()


def scatter_sum(x_BTD: Tensor, group: Group) -> Tensor:
    """[B, T, D] partial on every rank → [B, t, D], summed."""
    ends = ends_of(x_BTD.shape[1], group.size)
    return scatter_dealt(x_BTD.transpose(0, 1), group, ends).transpose(0, 1).contiguous()


def summed(x: Tensor, group: Group) -> Tensor:
    """A sum over the ranks, in a tensor of its own."""
    return group.all_reduce(x.contiguous().clone())


def as_it_is(x: Tensor, group: Group) -> Tensor:
    return x.view_as(x)


class Crossing(torch.autograd.Function):
    """`there(x, group)` forward, `back(grad, group)` backward, whose sums are in x's own dtype."""

    @staticmethod
    def forward(ctx, x, group, there, back, dtype):  # type: ignore[override]
        ctx.group, ctx.back, ctx.dtype = group, back, x.dtype
        return there(x.to(dtype), group)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return ctx.back(grad.to(ctx.dtype), ctx.group), None, None, None, None


def enter(x: Tensor, group: Group, sequence: int) -> Tensor:
    """Into a split layer. With sequence parallelism, of `sequence` positions, these are gathered, and the gradients of
    all ranks summed and scattered; without it, 0, gradients are summed. Under autocast x crosses as the product will
    read it."""
    kind = casting(x.device)
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    ways = (partial(gather_sequence, length=sequence), scatter_sum) if sequence else (as_it_is, summed)
    return Crossing.apply(x, group, *ways, dtype)  # type: ignore[return-value]


def leave(x: Tensor, group: Group, sequence: int) -> Tensor:
    """Out of a split layer: the other way round."""
    ways = (scatter_sum, partial(gather_sequence, length=sequence)) if sequence else (summed, as_it_is)
    return Crossing.apply(x, group, *ways, x.dtype)  # type: ignore[return-value]


# Modules ---------------------------------------------------------------------------------------------------


class ColumnLinear(nn.Module):
    """Holds some of the output features, whole units of them; gathers the positions of its input. Where units read keys
    that other ranks compute, these are borrowed. entered: its input has been gathered by a module around it."""

    def __init__(
        self,
        whole: nn.Linear | nn.Conv2d,
        group: Group,
        sequence: int,
        units: Units | None = None,
        chunks: int = 1,
        *,
        entered: bool = False,
    ) -> None:
        super().__init__()
        self.entered = entered
        self.group, self.sequence, self.chunks = group, sequence, Chunks(group, sequence, chunks)
        full = len(whole.weight)
        self.units = units = units or Units(full)
        self.heads = dealt_heads(units, ends_of(units.count, group.size)) if units.group else []
        start, size = features_of(units, group)
        self.product = product_of(whole)
        self.weight = nn.Parameter(whole.weight.detach()[start : start + size].clone())
        self.bias = (
            None if whole.bias is None else nn.Parameter(whole.bias.detach()[start : start + size].clone())
        )
        cut = Cut(0, start, size, full)
        self.cuts = {"weight": cut, "bias": cut}

    def forward(self, x: Tensor) -> Tensor:
        if self.entered:
            y = self.product(x, self.weight, self.bias)
        elif self.chunks.count > 1:
            y = column_product(x, self.weight, self.bias, self.chunks)
        else:
            y = self.product(enter(x, self.group, self.sequence), self.weight, self.bias)
        return with_lent_keys(y, self.units, self.heads, self.group)


class RowLinear(nn.Module):
    """Holds some of the input features, whole units of them; its output is summed, and scattered along the positions.
    The bias stays whole and is added once, after the sum."""

    def __init__(
        self,
        whole: nn.Linear | nn.Conv2d,
        group: Group,
        sequence: int,
        units: Units | None = None,
        chunks: int = 1,
    ) -> None:
        super().__init__()
        self.group, self.sequence, self.chunks = group, sequence, Chunks(group, sequence, chunks)
        full = whole.weight.shape[1]
        start, size = features_of(units or Units(full), group)
        self.product = product_of(whole)
        self.weight = nn.Parameter(whole.weight.detach()[:, start : start + size].clone())
        self.bias = None if whole.bias is None else nn.Parameter(whole.bias.detach().clone())
        self.cuts = {"weight": Cut(1, start, size, full)}

    def forward(self, x: Tensor) -> Tensor:
        if self.chunks.count > 1:
            y = row_product(x, self.weight, self.chunks)
        else:
            y = leave(self.product(x, self.weight, None), self.group, self.sequence)
        return y if self.bias is None else y + self.bias.view(-1, *(1,) * (self.weight.dim() - 2))


class VocabEmbedding(nn.Module):
    """Holds some rows of the table; tokens of other ranks give zero, and the sum is scattered."""

    def __init__(self, whole: nn.Embedding, group: Group, sequence: int, units: Units | None = None) -> None:
        super().__init__()
        self.group, self.sequence = group, sequence
        self.start, size = part_of(whole.num_embeddings, group)
        self.weight = nn.Parameter(whole.weight.detach()[self.start : self.start + size].clone())
        self.padding = whole.padding_idx  # no gradient reaches its row
        self.cuts = {"weight": Cut(0, self.start, size, whole.num_embeddings)}

    def forward(self, tokens_BT: Tensor) -> Tensor:
        local_BT = tokens_BT - self.start
        foreign_BT = (local_BT < 0) | (local_BT >= self.weight.shape[0])
        still = None if self.padding is None else self.padding - self.start
        still = still if still is not None and 0 <= still < self.weight.shape[0] else None
        x_BTD = F.embedding(local_BT.masked_fill(foreign_BT, 0), self.weight, still)
        x_BTD = x_BTD.masked_fill(foreign_BT.unsqueeze(-1), 0.0)
        return leave(x_BTD, self.group, self.sequence)


class VocabCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of logits dealt along the vocabulary, of the targets that count: three sums per token
    instead of V numbers."""

    @staticmethod
    def forward(ctx, logits_Nv, targets_N, start, group):  # type: ignore[override]
        top_N = group.all_reduce(logits_Nv.max(-1).values, dist.ReduceOp.MAX)
        shifted_Nv = logits_Nv - top_N[:, None]
        local_N = targets_N - start
        own_N = (local_N >= 0) & (local_N < logits_Nv.shape[1])
        index_N1 = local_N.masked_fill(~own_N, 0)[:, None]
        hit_N = shifted_Nv.gather(1, index_N1)[:, 0].masked_fill(~own_N, 0.0)
        power_Nv = shifted_Nv.exp()
        both_2N = group.all_reduce(torch.stack((power_Nv.sum(-1), hit_N)))
        out_N = targets_N == IGNORED
        ctx.save_for_backward(power_Nv.div_(both_2N[0][:, None]), index_N1, own_N, out_N)
        return (both_2N[0].log() - both_2N[1]).masked_fill_(out_N, 0.0).sum()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        share_Nv, index_N1, own_N, out_N = ctx.saved_tensors
        share_Nv = share_Nv.scatter_add(1, index_N1, -own_N.to(share_Nv.dtype)[:, None])
        return share_Nv * grad.expand(out_N.shape).masked_fill(out_N, 0.0)[:, None], None, None, None


def vocab_loss(group: Group, start: int):
    """The summed cross-entropy over dealt logits."""

    def loss(logits_BTv: Tensor, targets_BT: Tensor) -> Tensor:
        flat_Nv = (
            logits_BTv.flatten(0, 1).float()
            if logits_BTv.dtype == torch.bfloat16
            else logits_BTv.flatten(0, 1)
        )
        return VocabCrossEntropy.apply(flat_Nv, targets_BT.flatten(), start, group)  # type: ignore[return-value]

    return loss


class GatherVocab(torch.autograd.Function):
    """[..., v] → [..., V] on every rank; each keeps its part of the gradient, since all compute the same loss. ends:
    where each rank's part begins, and V."""

    @staticmethod
    def forward(ctx, logits, ends, group):  # type: ignore[override]
        ctx.part = ends[group.index], ends[group.index + 1] - ends[group.index]
        return gather_dealt(logits.movedim(-1, 0).contiguous(), group, ends).movedim(0, -1)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return grad.narrow(-1, *ctx.part).contiguous(), None, None


# The pass --------------------------------------------------------------------------------------------------


def split_modules(
    root: nn.Module,
    anatomy: Anatomy,
    group: Group,
    length: int,
    whole: Callable[[str], bool] = lambda name: False,
    chunks: int = 1,
) -> dict[str, Cut]:
    """Replace the modules of `root` that the anatomy splits; returns parameter name → Cut for the split ones. whole:
    modules that stay as they are. chunks: of positions, see `chunks.py`.

    Runs on any device, the meta device included. A group of one leaves the model as it is.
    """
    cuts: dict[str, Cut] = {}
    if group.size == 1:
        return cuts
    makers = {
        Split.COLUMN: partial(ColumnLinear, chunks=chunks),
        Split.VOCAB_OUT: partial(ColumnLinear, chunks=chunks),
        Split.ROW: partial(RowLinear, chunks=chunks),
        Split.VOCAB_IN: VocabEmbedding,
        Split.NORM: DealtNorm,
    }
    for name, module in list(root.named_modules()):
        split = None if whole(name) else anatomy.split_of(name)
        if split is None:
            continue
        if split is Split.GATHERED:
            module.register_forward_pre_hook(partial(_gathered, group, length), with_kwargs=True)
        elif split is Split.SLICED and length:
            module.register_forward_hook(partial(_sliced, part_of(length, group)))
        elif split in makers:
            unit, more = anatomy.units_of(name), {}
            if split is Split.COLUMN and _entered(name, anatomy):
                more = {"entered": True}
            replacement = makers[split](module, group, length, unit if unit.count else None, **more)  # type: ignore[arg-type]
            parent, _, leaf = name.rpartition(".")
            setattr(root.get_submodule(parent), leaf, replacement)
            cuts |= {
                f"{name}.{key}": cut
                for key, cut in replacement.cuts.items()
                if getattr(replacement, key) is not None
            }
        elif split is Split.HEAD_DROPOUT:
            units = anatomy.units_of(name)
            heads = Places.whole(units.before(units.count)).part(*features_of(units, group))
            module.places[1] = heads  # type: ignore[index,union-attr]
        elif split is Split.HEADS:
            units = anatomy.units_of(name)
            module.counts = dealt_heads(units, ends_of(units.count, group.size))[group.index].counts  # type: ignore[assignment]
    return cuts


def _entered(name: str, anatomy: Anatomy) -> bool:
    """Whether a module around this one gathers its input."""
    parts = name.split(".")
    return any(anatomy.split_of(".".join(parts[:i])) is Split.GATHERED for i in range(1, len(parts)))


def _gathered(group: Group, length: int, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The first argument, wherever it stands, of all positions."""
    if args:
        return (enter(args[0], group, length), *args[1:]), kwargs
    first = next(key for key, x in kwargs.items() if isinstance(x, Tensor))
    return args, {**kwargs, first: enter(kwargs[first], group, length)}


def _sliced(part: tuple[int, int], module: nn.Module, args: tuple, y_BTD: Tensor) -> Tensor:
    """Of what a module gives for all positions, this rank's."""
    return y_BTD.narrow(1, *part)


def split(stages: "Stages", context: "PassContext") -> None:
    """Deal out the modules of this rank's stages over `tp`, and let the loss be what it is on one device: over dealt
    logits where it is the summed cross-entropy, over gathered ones where it is the model's own."""
    if not context.anatomy.splits:
        what = context.anatomy.whole or "this model says nothing of how tp could split it"
        fix = "tp=1, or a model with an anatomy"
        raise UsageError(what, where="plan.tp, model.kind", fix=fix, code="P12")
    if context.anatomy.uncut:
        raise UsageError(context.anatomy.uncut, where="plan.tp, model.kind", fix="tp=1", code="P12")
    tp = context.mesh.tp
    head = next((n for n, s in context.anatomy.splits.items() if s is Split.VOCAB_OUT), None)
    for stage in stages.values():
        context.cuts.update(
            split_modules(stage, context.anatomy, tp, context.length, context.whole, context.plan.chunks)
        )
        if stage.last and head is not None:
            full = context.shapes[f"{head}.weight"][0]
            loss, ends = stage.loss, ends_of(full, tp.size)
            stage.whole = lambda y, ends=ends: GatherVocab.apply(y, ends, tp)
            if context.anatomy.cross_entropy:
                stage.loss = vocab_loss(tp, part_of(full, tp)[0])
            else:
                stage.loss = lambda y, targets, loss=loss, ends=ends: loss(
                    GatherVocab.apply(y, ends, tp), targets
                )


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
