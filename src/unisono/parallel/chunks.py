"""Products of tensor parallelism in chunks of positions: while one is multiplied, the next is on its way (Wang et al.,
Overlap communication with dependent computation via decomposition, 2023).

A layer that gathers its input multiplies each chunk as it arrives; one that scatters its output sends each chunk as it
is made. Backward does the same the other way round, and the weight's gradient, which no rank waits for, is made while
the last chunk is on its way. Sums over ranks are taken in the order of the whole, chunk or not.

Shapes: B batch, T positions, t those of this rank, k those of a chunk that one rank holds, R ranks, D and F features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from unisono.comm.device import casting
from unisono.comm.flight import Flight
from unisono.comm.group import Group
from unisono.comm.tree import tree_sum
from unisono.parallel.parts import ends_of, longest

Product = Callable[[Tensor], Tensor]  # rows [N, D] → [N, F]


@dataclass(frozen=True, slots=True)
class Chunks:
    """Positions of a sample that are dealt to the ranks of a group, in `count` chunks, of which each has some of every
    rank's. Where a rank has fewer positions than another, its last chunks end in rows of zeros."""

    group: Group
    length: int
    count: int

    @property
    def ends(self) -> list[int]:
        """The first position of each rank, and the length."""
        return ends_of(self.length, self.group.size)

    @property
    def cuts(self) -> list[tuple[int, int]]:
        """The first and the last of a rank's own positions in each chunk."""
        most = longest(self.ends)
        return list(pairwise(ends_of(most, min(self.count, most))))

    def places(self, cut: tuple[int, int]) -> list[slice]:
        """The places in the whole sample of each rank's part of a chunk."""
        a, b = cut
        return [slice(min(first + a, last), min(first + b, last)) for first, last in pairwise(self.ends)]


def gathered(x_BtD: Tensor, chunks: Chunks, product: Product) -> tuple[Tensor, Tensor]:
    """(the product of all positions [B, T, F], all positions [B, T, D]). Every rank calls it, or it hangs."""
    group, (batch, _, width) = chunks.group, x_BtD.shape
    cuts = chunks.cuts
    whole_BTD = x_BtD.new_empty((batch, chunks.length, width))
    y_BTF = whole_BTD  # until the first product says how wide it is
    coming = _start_gather(x_BtD, cuts[0], group)
    for cut, following in zip(cuts, [*cuts[1:], None], strict=True):
        (flight, rows_RBkD), here = coming, chunks.places(cut)
        if following is not None:
            coming = _start_gather(x_BtD, following, group)
        flight.land()
        _put(whole_BTD, rows_RBkD, here)
        columns = product(rows_RBkD.view(-1, width))
        if y_BTF is whole_BTD:
            y_BTF = columns.new_empty((batch, chunks.length, columns.shape[-1]))
        _put(y_BTF, columns.view(*rows_RBkD.shape[:3], -1), here)
    return y_BTF, whole_BTD


class Scattering:
    """The product of all positions [B, T, D], partial on every rank, on its way to who holds them: chunk by chunk."""

    def __init__(self, x_BTD: Tensor, chunks: Chunks, product: Product, dtype: torch.dtype | None) -> None:
        """dtype: in which sums are taken; None: in that of the product. Every rank makes one, or it hangs."""
        self.chunks, self.batch = chunks, len(x_BTD)
        self.flights: list[tuple[Flight, Tensor, Tensor]] = []
        for cut in chunks.cuts:
            rows = _rows(x_BTD, chunks.places(cut), cut[1] - cut[0])
            columns = product(rows.view(-1, rows.shape[-1]))
            columns = columns if dtype is None else columns.to(dtype)
            parts, pending = chunks.group.start_exchange(columns.reshape(-1))
            self.flights.append((Flight(chunks.group, "all_to_all", pending), parts, columns))
        self.width = columns.shape[-1]

    def landed(self) -> Tensor:
        """[B, t, F], summed over the ranks."""
        chunks, ends = self.chunks, self.chunks.ends
        length = ends[chunks.group.index + 1] - ends[chunks.group.index]
        out = self.flights[0][1].new_empty((self.batch, length, self.width))
        for (a, b), (flight, parts, _) in zip(chunks.cuts, self.flights, strict=True):
            flight.land()
            summed = tree_sum(parts.unbind(0)).view(self.batch, b - a, self.width)
            here = out[:, a : min(b, length)]
            here.copy_(summed[:, : here.shape[1]])
        return out


def _start_gather(x_BtD: Tensor, cut: tuple[int, int], group: Group) -> tuple[Flight, Tensor]:
    """(the gather of a chunk, where it arrives: [R, B, k, D])."""
    a, b = cut
    part = x_BtD[:, a:b].contiguous()
    if part.shape[1] < b - a:
        part = F.pad(part, (0, 0, 0, b - a - part.shape[1]))
    out = part.new_empty((group.size, *part.shape))
    return Flight(group, "all_gather", group.start_all_gather(out.view(-1), part.view(-1))), out


def _put(whole_BTD: Tensor, rows_RBkD: Tensor, here: Sequence[slice]) -> None:
    for place, rows in zip(here, rows_RBkD, strict=True):
        whole_BTD[:, place] = rows[:, : place.stop - place.start]


def _rows(x_BTD: Tensor, here: Sequence[slice], most: int) -> Tensor:
    """A chunk of the whole as it is exchanged, [R, B, k, D]."""
    out = x_BTD.new_zeros((len(here), len(x_BTD), most, x_BTD.shape[-1]))
    for place, rows in zip(here, out, strict=True):
        rows[:, : place.stop - place.start] = x_BTD[:, place]
    return out


def _weight_grad(ctx, grad: Tensor, x: Tensor, weight: Tensor, at: int) -> Tensor | None:
    """[F, D] of grad [..., F] and x [..., D], where it is asked for."""
    return (grad.flatten(0, 1).T @ x.flatten(0, 1)).to(weight.dtype) if ctx.needs_input_grad[at] else None


class ColumnProduct(torch.autograd.Function):
    """x [B, t, D] of this rank → the product of all positions with this rank's features [B, T, F]."""

    @staticmethod
    def forward(ctx, x, weight, bias, chunks, dtype):  # type: ignore[override]
        narrow, add = weight.to(dtype), None if bias is None else bias.to(dtype)
        y, whole = gathered(x.to(dtype), chunks, lambda rows: F.linear(rows, narrow, add))
        ctx.save_for_backward(whole, weight)
        ctx.chunks, ctx.dtype, ctx.add = chunks, x.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        whole, weight = ctx.saved_tensors
        narrow = weight.to(whole.dtype)
        scattering = Scattering(grad, ctx.chunks, lambda rows: rows @ narrow, ctx.dtype)
        to_weight = _weight_grad(ctx, grad, whole, weight, 1)
        to_bias = grad.flatten(0, 1).sum(0).to(ctx.add) if ctx.add is not None else None
        return scattering.landed(), to_weight, to_bias, None, None


class RowProduct(torch.autograd.Function):
    """x [B, T, D] of this rank's features → this rank's positions of the sum of all ranks' products [B, t, F]."""

    @staticmethod
    def forward(ctx, x, weight, chunks, dtype):  # type: ignore[override]
        narrow, x_narrow = weight.to(dtype), x.to(dtype)
        scattering = Scattering(x_narrow, chunks, lambda rows: F.linear(rows, narrow), None)
        ctx.save_for_backward(x_narrow, weight)
        ctx.chunks, ctx.dtype = chunks, x.dtype
        return scattering.landed()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        x, weight = ctx.saved_tensors
        narrow = weight.to(x.dtype)
        to_x, whole = gathered(grad.to(x.dtype), ctx.chunks, lambda rows: rows @ narrow)
        return to_x.to(ctx.dtype), _weight_grad(ctx, whole, x, weight, 1), None, None


def _column_product(x: Tensor, weight: Tensor, bias: Tensor | None, chunks: Chunks) -> Tensor:
    """A gather along the positions and the product behind it."""
    dtype = _read_in(x)
    with torch.autocast(casting(x.device), enabled=False):
        return ColumnProduct.apply(x, weight, bias, chunks, dtype)  # type: ignore[return-value]


def _row_product(x: Tensor, weight: Tensor, chunks: Chunks) -> Tensor:
    """A product and the scatter behind it."""
    dtype = _read_in(x)
    with torch.autocast(casting(x.device), enabled=False):
        return RowProduct.apply(x, weight, chunks, dtype)  # type: ignore[return-value]


def _read_in(x: Tensor) -> torch.dtype:
    """In what numbers a product reads x here."""
    kind = casting(x.device)
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


# Other ranks depend on when these are called, so they are no part of a graph.
column_product = cast(
    "Callable[[Tensor, Tensor, Tensor | None, Chunks], Tensor]", torch.compiler.disable(_column_product)
)
row_product = cast("Callable[[Tensor, Tensor, Chunks], Tensor]", torch.compiler.disable(_row_product))
