"""`tp=RxC`: products of matrices on ranks in rows and columns (SUMMA: van de Geijn & Watts, 1997; for transformers Xu
et al., "An efficient 2D method for training super-large deep learning models", 2021).

The ranks of a row have the same samples and deal out the features; those of a column have the same features and deal
out the samples. A weight lies in blocks: output features by columns, input features by rows. A product gathers the
features of its samples along the row and the inputs of its weights along the column; backward sums along both. Biases,
norms and tables lie in blocks too, so nothing is held twice.

Shapes: b samples of this row, T positions, d this column's part of D features.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.comm.group import Group
from unisono.comm.mesh import Mesh
from unisono.models.noise import Noise
from unisono.parallel.cut import Carry, Stage
from unisono.parallel.heads import dealt_heads, with_lent_keys
from unisono.parallel.parts import Cut, Dealt, ends_of, features_of, part_of
from unisono.parallel.tensor import (
    Crossing,
    GatherVocab,
    as_it_is,
    gather_dealt,
    scatter_dealt,
    summed,
    vocab_loss,
)
from unisono.plan.grid import Grid
from unisono.spec.errors import UsageError
from unisono.spec.layout import Places, Split, Units

if TYPE_CHECKING:
    from unisono.parallel.pass_context import PassContext, Stages


@dataclass(frozen=True, slots=True)
class GridGroups:
    """row: the ranks with this one's samples, a column of features each. column: those with this one's features, a row
    of samples each."""

    row: Group
    column: Group


def grid_groups(mesh: Mesh, grid: Grid) -> GridGroups:
    """Every rank of the mesh calls it, or it hangs."""
    ranks, (i, j) = mesh.tp.ranks, divmod(mesh.tp.index, grid.columns)
    row, column = ranks[i * grid.columns : (i + 1) * grid.columns], ranks[j :: grid.columns]
    return GridGroups(mesh.group_of("tp", list(row)), mesh.group_of("tp", list(column)))


# How blocks meet --------------------------------------------------------------------------------------------


def gathered(x: Tensor, group: Group, dim: int, ends: list[int]) -> Tensor:
    """This rank's part of `dim`, which ranks share as `ends` says → all of it."""
    return gather_dealt(x.transpose(0, dim), group, ends).transpose(0, dim)


def scattered(x: Tensor, group: Group, dim: int, ends: list[int]) -> Tensor:
    """All of `dim`, partial on every rank → this rank's part, summed."""
    return scatter_dealt(x.transpose(0, dim), group, ends).transpose(0, dim).contiguous()


def whole_of(x: Tensor, group: Group, dim: int, ends: list[int]) -> Tensor:
    """As `gathered`; the gradients of all ranks are summed, and scattered."""
    ways = (partial(gathered, dim=dim, ends=ends), partial(scattered, dim=dim, ends=ends))
    return Crossing.apply(x, group, *ways, x.dtype)  # type: ignore[return-value]


class GridProduct(torch.autograd.Function):
    """x [b, T, in's part] and weight [out's part, in's block] → [b, T, out's part]. What is gathered is not kept for
    backward, which gathers it again."""

    @staticmethod
    def forward(ctx, x, weight, groups, features, inputs, dtype):  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        ctx.groups, ctx.features, ctx.inputs, ctx.dtype = groups, features, inputs, dtype
        return F.linear(*_meet(ctx, x, weight))

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        x, weight = ctx.saved_tensors
        whole_x, whole_weight = _meet(ctx, x, weight)
        grad = grad.to(ctx.dtype)
        to_x = (grad @ whole_weight).to(x.dtype)
        to_weight = (grad.flatten(0, -2).T @ whole_x.flatten(0, -2)).to(weight.dtype)
        return (
            scattered(to_x, ctx.groups.row, -1, ctx.features),
            scattered(to_weight, ctx.groups.column, 1, ctx.inputs),
            None,
            None,
            None,
            None,
        )


def _meet(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """All features of this row's samples; all inputs of this column's outputs."""
    return (
        gathered(x.to(ctx.dtype), ctx.groups.row, -1, ctx.features),
        gathered(weight.to(ctx.dtype), ctx.groups.column, 1, ctx.inputs),
    )


# Modules ----------------------------------------------------------------------------------------------------


class GridVector:
    """A vector of features dealt over columns, and each column's part over its rows."""

    def __init__(self, whole: Tensor, groups: GridGroups, part: tuple[int, int]) -> None:
        start, size = part
        first, length = part_of(size, groups.column)
        self.column, self.ends = groups.column, ends_of(size, groups.column.size)
        self.block = nn.Parameter(whole.detach()[start + first : start + first + length].clone())
        self.cuts = (Cut(0, start + first, length, len(whole)),)

    def whole(self, block: Tensor) -> Tensor:
        """This column's part."""
        return whole_of(block, self.column, 0, self.ends)


class GridLinear(nn.Module):
    """One block of a weight. inputs, outputs: the units in which features come and leave."""

    def __init__(self, whole: nn.Linear, groups: GridGroups, inputs: Units, outputs: Units) -> None:
        super().__init__()
        self.groups, self.outputs = groups, outputs
        columns = groups.row.size
        self.features = [inputs.before(end) for end in ends_of(inputs.count, columns)]
        self.inputs = ends_of(whole.in_features, groups.column.size)
        self.heads = dealt_heads(outputs, ends_of(outputs.count, columns)) if outputs.group else []
        out, into = features_of(outputs, groups.row), part_of(whole.in_features, groups.column)
        self.weight = nn.Parameter(whole.weight.detach().narrow(0, *out).narrow(1, *into).clone())
        cuts = Cut(0, *out, whole.out_features), Cut(1, *into, whole.in_features)
        self.cuts: dict[str, tuple[Cut, ...]] = {"weight": cuts}
        self.vector = None if whole.bias is None else GridVector(whole.bias, groups, out)
        self.bias = None if self.vector is None else self.vector.block
        if self.vector is not None:
            self.cuts["bias"] = self.vector.cuts

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        y: Tensor = GridProduct.apply(x, self.weight, self.groups, self.features, self.inputs, dtype)  # type: ignore[assignment]
        if self.vector is not None and self.bias is not None:
            y = y + self.vector.whole(self.bias).to(y.dtype)
        return with_lent_keys(y, self.outputs, self.heads, self.groups.row)


class GridEmbedding(nn.Module):
    """One block of a table: rows by columns of ranks, width by rows, as a classifier's that it may be tied to."""

    def __init__(self, whole: nn.Embedding, groups: GridGroups) -> None:
        super().__init__()
        self.groups, self.width = groups, whole.embedding_dim
        rows, into = part_of(whole.num_embeddings, groups.row), part_of(self.width, groups.column)
        self.start = rows[0]
        self.weight = nn.Parameter(whole.weight.detach().narrow(0, *rows).narrow(1, *into).clone())
        self.cuts = {"weight": (Cut(0, *rows, whole.num_embeddings), Cut(1, *into, self.width))}

    def forward(self, tokens_bT: Tensor) -> Tensor:
        row, column = self.groups.row, self.groups.column
        table_vD = whole_of(self.weight, column, 1, ends_of(self.width, column.size))
        local_bT = tokens_bT - self.start
        foreign_bT = (local_bT < 0) | (local_bT >= len(table_vD))
        x_bTD = F.embedding(local_bT.masked_fill(foreign_bT, 0), table_vD)
        x_bTD = x_bTD.masked_fill(foreign_bT.unsqueeze(-1), 0.0)
        ends = ends_of(self.width, row.size)
        ways = (partial(scattered, dim=-1, ends=ends), partial(gathered, dim=-1, ends=ends))
        return Crossing.apply(x_bTD, row, *ways, x_bTD.dtype)  # type: ignore[return-value]


class GridPositions(nn.Module):
    """One block of a position table: positions by rows, width by columns. The rows meet, and `whole` adds them."""

    def __init__(self, whole: nn.Module, groups: GridGroups) -> None:
        super().__init__()
        weight: Tensor = whole.weight  # type: ignore[assignment]
        (full, width), self.column = weight.shape, groups.column
        rows, part = part_of(full, groups.column), part_of(width, groups.row)
        self.weight = nn.Parameter(weight.detach().narrow(0, *rows).narrow(1, *part).clone())
        self.cuts = {"weight": (Cut(0, *rows, full), Cut(1, *part, width))}
        self.ends = ends_of(full, groups.column.size)
        self.places: Places | None = None
        self._adds = (whole,)  # in a tuple: its own table is none of this rank's parameters

    def forward(self, x_bTd: Tensor, noise: Noise | None = None) -> Tensor:
        self._adds[0].places = self.places  # type: ignore[assignment]
        table = {"weight": whole_of(self.weight, self.column, 0, self.ends)}
        return torch.func.functional_call(self._adds[0], table, (x_bTd, noise))


class GridNorm(nn.Module):
    """A norm over features that the row deals out; its own vectors lie in blocks."""

    def __init__(self, whole: nn.LayerNorm | nn.RMSNorm, groups: GridGroups) -> None:
        super().__init__()
        self.row, (self.width,) = groups.row, whole.normalized_shape
        self.centred = isinstance(whole, nn.LayerNorm)
        self.eps = torch.finfo(whole.weight.dtype).eps if whole.eps is None else whole.eps
        part = part_of(self.width, groups.row)
        parameters = dict(whole.named_parameters())
        self.vectors = {key: GridVector(p, groups, part) for key, p in parameters.items()}
        for key in ("weight", "bias"):
            setattr(self, key, self.vectors[key].block if key in parameters else None)
        self.cuts = {key: vector.cuts for key, vector in self.vectors.items()}

    def forward(self, x: Tensor) -> Tensor:
        y = grid_norm(x, self.row, self.width, self.centred, self.eps)
        if self.weight is not None:
            y = y * self.vectors["weight"].whole(self.weight)  # type: ignore[arg-type]
        return y if self.bias is None else y + self.vectors["bias"].whole(self.bias)  # type: ignore[arg-type]


# The pass ---------------------------------------------------------------------------------------------------


def split_over_grid(stages: "Stages", context: "PassContext") -> None:
    """Deal out all of this rank's stages over the rows and columns of `tp`. Raises UsageError P12 where the model has
    parameters of which its anatomy says nothing, or no classifier whose loss may be dealt."""
    grid: Grid = context.plan.tp  # pyright: ignore[reportAssignmentType]
    groups = grid_groups(context.mesh, grid)
    # Ranks of cp have seen some positions each; what FSDP scatters is summed over them already.
    alike = context.mesh.cp if context.plan.shard == 1 else context.mesh.group_of("cp", [context.mesh.rank])
    head = next((n for n, s in context.anatomy.splits.items() if s is Split.VOCAB_OUT), None)
    if head is None or not context.anatomy.sequence:
        _refuse(grid, "this model has no classifier over a vocabulary")
    for stage in stages.values():
        for name, module in list(stage.named_modules()):
            block = _block_of(name, module, groups, context)
            if block is not None:
                parent, _, leaf = name.rpartition(".")
                setattr(stage.get_submodule(parent), leaf, block)
                for key, cuts in block.cuts.items():
                    context.dealt[f"{name}.{key}"] = Dealt(cuts, False, "cp", alike)
        whole = [name for name, _ in stage.named_parameters() if name not in context.dealt]
        if whole:
            _refuse(grid, f"this model says nothing of how a grid could split {whole[0]}")
        stage.register_forward_pre_hook(partial(_own_samples, part=part_of(context.samples, groups.column)))
        if stage.last:
            _close(stage, groups, context, context.shapes[f"{head}.weight"][0])


def _refuse(grid: Grid, what: str) -> None:
    fix = f"tp={int(grid)}, or a model of kind gpt"
    raise UsageError(f"tp={grid}: {what}", where="plan.tp, model.kind", fix=fix, code="P12")


def _block_of(name: str, module: nn.Module, groups: GridGroups, context: "PassContext") -> Any:
    """This rank's block of a module, which takes its place; None where it stays, and is told which part it sees."""
    split, units = context.anatomy.split_of(name), context.anatomy.units_of(name)
    row = groups.row
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return GridNorm(module, groups)
    if isinstance(module, nn.Linear) and split in (Split.COLUMN, Split.ROW, Split.VOCAB_OUT):
        inputs, outputs = Units(module.in_features), Units(module.out_features)
        if units.count:
            inputs, outputs = (units, outputs) if split is Split.ROW else (inputs, units)
        return GridLinear(module, groups, inputs, outputs)
    if isinstance(module, nn.Embedding) and split is Split.VOCAB_IN:
        return GridEmbedding(module, groups)
    if split is Split.POSITIONS:
        return GridPositions(module, groups)
    if split is Split.HEADS:
        module.counts = dealt_heads(units, ends_of(units.count, row.size))[row.index].counts  # type: ignore[assignment]
    elif split is Split.HEAD_DROPOUT:
        whole = Places.whole(units.before(units.count))
        module.places[1] = whole.part(*features_of(units, row))  # type: ignore[index,union-attr]
    elif split is Split.SEQUENCE_DROPOUT:
        module.places[2] = Places.whole(_width(context)).dealt(row.index, row.size)  # type: ignore[index,union-attr]
    return None


def _width(context: "PassContext") -> int:
    """Of the residual stream."""
    head = next(name for name, split in context.anatomy.splits.items() if split is Split.VOCAB_OUT)
    return context.shapes[f"{head}.weight"][1]


def _own_samples(
    stage: nn.Module, arguments: tuple[Carry, Noise | None], part: tuple[int, int]
) -> tuple[Carry, Noise | None]:
    """This row's samples of inputs, and of the noise."""
    x, noise = arguments
    if noise is not None:
        documents = noise.documents and noise.documents.samples(*part)
        noise = replace(noise, samples=noise.samples.narrow(0, *part), documents=documents)
    return x.narrow(0, *part) if stage.first else x, noise  # type: ignore[union-attr]


def _close(stage: Stage, groups: GridGroups, context: "PassContext", vocab: int) -> None:
    """The loss of all samples on every rank, and logits of all of them and of the whole vocabulary."""
    own_loss, samples = stage.loss, context.samples
    part = part_of(samples, groups.column)

    def whole(logits: Tensor) -> Tensor:
        logits = GatherVocab.apply(logits, ends_of(vocab, groups.row.size), groups.row)  # type: ignore[assignment]
        ends = ends_of(samples, groups.column.size)
        return GatherVocab.apply(logits.movedim(0, -1), ends, groups.column).movedim(-1, 0)  # type: ignore[union-attr]

    dealt = vocab_loss(groups.row, part_of(vocab, groups.row)[0])

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        mine = dealt(logits, targets.narrow(0, *part))
        return Crossing.apply(mine, groups.column, summed, as_it_is, mine.dtype)  # type: ignore[return-value]

    stage.whole = whole
    stage.loss = loss if context.anatomy.cross_entropy else lambda y, targets: own_loss(whole(y), targets)


def crossing_shape(shape: tuple[int, ...], mesh: Mesh, grid: Grid) -> tuple[int, ...]:
    """Of what one rank hands to the next stage: its row's samples, its column's features."""
    i, j = divmod(mesh.tp.index, grid.columns)
    rows, columns = ends_of(shape[0], grid.rows), ends_of(shape[-1], grid.columns)
    return (rows[i + 1] - rows[i], *shape[1:-1], columns[j + 1] - columns[j])


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
