"""Gradients of tables, which hold the rows that were read alone: how replicas add them up.

They are gathered, rows and their numbers, and added in the order of the ranks: so all ranks have the same bits, and
what travels grows with the rows that were read instead of with the table.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unisono.comm.group import Group
from unisono.comm.mesh import Mesh
from unisono.parallel.params import Slot
from unisono.sync import Sync, Verdict
from unisono.sync._around import SyncAround


class RowSync(SyncAround):
    """A policy, and beside it the sums of sparse gradients. groups: of ranks that hold the same rows, one inside the
    other's results. Every member calls `settle`, or it hangs."""

    def __init__(self, inner: Sync, slots: Sequence[Slot], groups: Sequence[Group]) -> None:
        super().__init__(inner)
        self.masters = [slot.master for slot in slots]
        self.groups = [group for group in groups if group.size > 1]

    def settle(self) -> Verdict:
        verdict = self.inner.settle()
        add_up(self.masters, self.groups)
        return verdict


def with_rows(sync: Sync, slots: Sequence[Slot], mesh: Mesh, ep: int) -> Sync:
    """The policy, which adds up sparse gradients too where there are any: inside a replica, then over `dp`."""
    sparse = [slot for slot in slots if slot.sparse and slot.live.requires_grad]
    return RowSync(sync, sparse, (mesh.dealt(ep)[1], mesh.dp)) if sparse else sync


@torch.no_grad()
def add_up(masters: Sequence[nn.Parameter], groups: Sequence[Group]) -> None:
    """Let each gradient be the sum over all groups, each row once, ascending; of one that nobody read, none."""
    grads = [_once(p) for p in masters]
    there = [p.grad is not None for p in masters]
    for group in groups:
        grads = _summed(grads, group)
    for p, grad, was in zip(masters, grads, there, strict=True):
        p.grad = grad if was or grad._nnz() else None


def _once(p: nn.Parameter) -> Tensor:
    """The gradient with each row once."""
    if p.grad is not None:
        return p.grad.coalesce()
    rows = torch.empty((1, 0), dtype=torch.int64, device=p.device)
    return _sparse(rows, p.new_empty((0, *p.shape[1:])), p)


def _sparse(rows: Tensor, values: Tensor, like: Tensor) -> Tensor:
    shape = like.shape
    return torch.sparse_coo_tensor(rows, values, shape, is_coalesced=True, check_invariants=False)


def _summed(grads: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Of all tables in three collectives: how many rows each has, which, and what is in them."""
    counts_here = grads[0].values().new_tensor([grad._nnz() for grad in grads], dtype=torch.int64)
    counts = group.all_gather(counts_here[None])
    rows = _each(torch.cat([grad.indices()[0] for grad in grads]), counts.sum(1), group)
    widths = counts.new_tensor([grad.shape[1] for grad in grads])
    values = _each(torch.cat([grad.values().flatten() for grad in grads]), (counts * widths).sum(1), group)
    parts = [_split(r, v, c, grads) for r, v, c in zip(rows, values, counts.tolist(), strict=True)]
    return [_merged([part[i] for part in parts], grad) for i, grad in enumerate(grads)]


def _each(x: Tensor, lengths: Tensor, group: Group) -> list[Tensor]:
    """x [any length] of every member; what is short travels with zeros behind."""
    sizes = lengths.tolist()
    padded = x.new_zeros(max(sizes))
    padded[: len(x)] = x
    return [part[:size] for part, size in zip(group.all_gather(padded[None]), sizes, strict=True)]


def _split(
    rows: Tensor, values: Tensor, counts: Sequence[int], grads: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """One member's line as (rows, values) of each table."""
    flat = values.split([count * grad.shape[1] for count, grad in zip(counts, grads, strict=True)])
    each = zip(rows.split(list(counts)), flat, grads, strict=True)
    return [(r, v.view(len(r), grad.shape[1])) for r, v, grad in each]


def _merged(parts: Sequence[tuple[Tensor, Tensor]], like: Tensor) -> Tensor:
    """The sum, one member after the other: a row is once in each part, so the order of its terms is fixed."""
    rows, places = torch.unique(torch.cat([r for r, _ in parts]), return_inverse=True)
    total = like.values().new_zeros((len(rows), like.shape[1]))
    for place, (_, values) in zip(places.split([len(r) for r, _ in parts]), parts, strict=True):
        total.index_add_(0, place, values)
    return _sparse(rows[None], total, like)
