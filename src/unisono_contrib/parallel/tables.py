"""Tables of a recommender, dealt over `ep` (Naumov et al., 2019; Mudigere et al., "Software-hardware co-design for fast
and scalable training of deep learning recommendation models", 2022).

    table   a rank has some of the tables: indices travel to them, and the rows that were looked up come back
    row     a rank has some rows of each table: it looks up those, and what the ranks found is summed
    column  a rank has some columns of each table: everybody's indices are looked up, and the columns come back

Each rank looks up for all ranks of `ep`, so a gradient here is of all their samples, and nothing of it has to be summed
over `ep`. It holds the rows that were looked up and no others.

Shapes: n ranks, B samples of one rank, T tables, L rows that a sample reads of each, D width of a row, d its
dealt part.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.comm.group import Group
from unisono.parallel.params import Slot
from unisono.parallel.parts import Cut, ends_of, part_of
from unisono.parallel.pass_context import PassContext, Stages
from unisono.parallel.tensor import Crossing
from unisono.spec.errors import UsageError


def swap(x: Tensor, group: Group) -> Tensor:
    """x [n, ...] → the same shape: part i goes to rank i, and what rank i has for this one takes its place."""
    parts, pending = group.start_exchange(x.contiguous().view(-1))
    with group.recorder.span("comm", axis=group.axis, op="all_to_all", exposed=True, bytes=x.nbytes):
        pending.wait()
    return parts.view(x.shape)


def gathered(x: Tensor, group: Group) -> Tensor:
    return group.all_gather(x)


def scattered(x: Tensor, group: Group) -> Tensor:
    return group.reduce_scatter(x)


def _sizes(count: int, group: Group) -> list[int]:
    return [end - start for start, end in pairwise(ends_of(count, group.size))]


class DealtTables(nn.Module):
    """Indices [B, T, L] → sums of the rows that they name [B, T, D], as of the whole tables. Its children are this
    rank's parts, under the numbers of their tables; cuts: by parameter, what was taken of the whole."""

    def __init__(self, whole: nn.ModuleList, group: Group, dtype: torch.dtype) -> None:
        super().__init__()
        tables: list[nn.Embedding] = list(whole)  # type: ignore[arg-type]
        self.group, self.count, self.width, self.dtype = group, len(tables), tables[0].embedding_dim, dtype
        self.cuts: dict[str, Cut] = {}
        for number in self.mine():
            table = tables[number]
            cut = self.cut_of(table)
            rows, width = ((cut.size, table.weight.shape[1]), (table.weight.shape[0], cut.size))[cut.dim]
            part = nn.Embedding(rows, width, sparse=True, device="meta")
            part.weight = nn.Parameter(table.weight.detach().narrow(cut.dim, cut.start, cut.size).clone())
            self.add_module(str(number), part)
            self.cuts[f"{number}.weight"] = cut

    def mine(self) -> range:
        """Numbers of the tables of which this rank has a part."""
        return range(self.count)

    def cut_of(self, table: nn.Embedding) -> Cut:
        """What this rank has of one of them. As here: all."""
        return Cut(0, 0, table.num_embeddings, table.num_embeddings)

    def look_up(self, index_NTL: Tensor) -> Tensor:
        """[N, tables of this rank, L] → [N, tables of this rank, d]."""
        rows = [self.get_submodule(str(t))(index_NTL[:, i]).sum(1) for i, t in enumerate(self.mine())]
        shape = (index_NTL.shape[0], 0, self.width)
        return torch.stack(rows, 1) if rows else torch.empty(shape, dtype=self.dtype, device=index_NTL.device)

    def everybodys(self, index_BTL: Tensor) -> Tensor:
        """[B, T, L] → [n · B, T, L]."""
        return self.group.all_gather(index_BTL.contiguous())

    def back(self, parts: Tensor) -> Tensor:
        """[n, ...], part i for rank i → what each rank has for this one; gradients go the same way."""
        return Crossing.apply(parts, self.group, swap, swap, parts.dtype)  # type: ignore[return-value]


class WholeTables(DealtTables):
    """Whole tables; each rank has a run of them."""

    def mine(self) -> range:
        start, size = part_of(self.count, self.group)
        return range(start, start + size)

    def forward(self, index_BTL: Tensor) -> Tensor:
        n, sizes = self.group.size, _sizes(self.count, self.group)
        most = max(sizes)
        batch, _, lookups = index_BTL.shape
        parts = [F.pad(part, (0, 0, 0, most - part.shape[1])) for part in index_BTL.split(sizes, 1)]
        wanted = swap(torch.stack(parts), self.group)[:, :, : len(self.mine())]
        found_NTD = self.look_up(wanted.reshape(n * batch, -1, lookups))
        room = F.pad(found_NTD, (0, 0, 0, most - found_NTD.shape[1]))
        got = self.back(room.view(n, batch, most, self.width))
        return torch.cat([part[:, :size] for part, size in zip(got, sizes, strict=True)], 1)


class RowTables(DealtTables):
    """Some rows of each table; a row of another rank counts as nothing, and the ranks' sums are added."""

    def cut_of(self, table: nn.Embedding) -> Cut:
        return Cut(0, *part_of(table.num_embeddings, self.group), table.num_embeddings)

    def forward(self, index_BTL: Tensor) -> Tensor:
        every, sums = self.everybodys(index_BTL), list[Tensor]()
        for number in range(self.count):
            cut, table = self.cuts[f"{number}.weight"], self.get_submodule(str(number))
            local_NL = every[:, number] - cut.start
            foreign_NL = (local_NL < 0) | (local_NL >= cut.size)
            rows_NLD = table(local_NL.masked_fill(foreign_NL, 0))
            sums.append(rows_NLD.masked_fill(foreign_NL.unsqueeze(-1), 0.0).sum(1))
        partial_NTD = torch.stack(sums, 1)
        return Crossing.apply(partial_NTD, self.group, scattered, gathered, partial_NTD.dtype)  # type: ignore[return-value]


class ColumnTables(DealtTables):
    """Some columns of each table."""

    def cut_of(self, table: nn.Embedding) -> Cut:
        return Cut(1, *part_of(table.embedding_dim, self.group), table.embedding_dim)

    def forward(self, index_BTL: Tensor) -> Tensor:
        n, sizes = self.group.size, _sizes(self.width, self.group)
        most = max(sizes)
        found_NTd = self.look_up(self.everybodys(index_BTL))
        room = F.pad(found_NTd, (0, most - found_NTd.shape[2]))
        got = self.back(room.view(n, -1, self.count, most))
        return torch.cat([part[..., :size] for part, size in zip(got, sizes, strict=True)], -1)


_DEALT = {"table": WholeTables, "row": RowTables, "column": ColumnTables}


# The pass ------------------------------------------------------------------------------------------------------------


def stay_sparse(context: PassContext) -> bool:
    """Whether gradients of tables hold the rows that were read alone. Not where each micro-batch's is added along a
    tree, or to that of a second copy of the model: there they are like any other."""
    return not context.leafwise and len(context.placement) == len(context.blocks)


def deal(stages: Stages, context: PassContext) -> None:
    """Leave each rank of `ep` its part of the tables. Raises UsageError where there are fewer than ranks."""
    for stage in stages.values():
        if not any(name == context.anatomy.tables for name, _ in stage.named_modules()):
            continue
        whole = stage.get_submodule(context.anatomy.tables)
        for table in whole.children():
            table.sparse = stay_sparse(context)  # type: ignore[assignment]
        if context.plan.ep > 1:
            group, _ = context.mesh.dealt(context.plan.ep)
            _require(whole, context)
            dealt_tables = _DEALT[context.anatomy.table_cut](whole, group, context.dtype)  # type: ignore[arg-type]
            parent, _, leaf = context.anatomy.tables.rpartition(".")
            setattr(stage.get_submodule(parent), leaf, dealt_tables)
            context.cuts.update(
                {f"{context.anatomy.tables}.{name}": cut for name, cut in dealt_tables.cuts.items()}
            )


def _require(whole: nn.Module, context: PassContext) -> None:
    tables = [table.weight.shape for table in whole.children()]  # type: ignore[union-attr]
    rows, columns = min(shape[0] for shape in tables), tables[0][1]  # type: ignore[index]
    have = {"table": len(tables), "row": rows, "column": columns}[context.anatomy.table_cut]
    if context.plan.ep > have:
        what = f"ep={context.plan.ep} has only {have} {context.anatomy.table_cut}s to split"
        raise UsageError(what, where="plan.ep, model.table_sharding", fix=f"ep={have} or less", code="P12")


def is_table(name: str, context: PassContext) -> bool:
    """Whether a parameter is a table or a part of one."""
    return bool(context.anatomy.tables) and name.startswith(f"{context.anatomy.tables}.")


def ignored(stage: nn.Module, context: PassContext) -> set[nn.Parameter]:
    """Parameters that `shard` leaves as they are."""
    return {p for name, p in stage.named_parameters() if is_table(name, context) and stay_sparse(context)}


def marked(slots: Sequence[Slot], context: PassContext) -> list[Slot]:
    """The slots, those of tables with what is particular to them."""
    if not any(is_table(slot.name, context) for slot in slots):
        return list(slots)
    sparse, (_, holders) = stay_sparse(context), context.mesh.dealt(context.plan.ep)
    again = sparse and holders.index > 0
    return [
        replace(slot, lazy=True, sparse=sparse, copy=slot.copy or again)
        if is_table(slot.name, context)
        else slot
        for slot in slots
    ]
