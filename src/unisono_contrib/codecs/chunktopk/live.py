"""The largest elements of each chunk on their way: chosen, coded, given to all, added up in one order."""

from collections.abc import Iterator, Sequence

import torch
from torch import Size, Tensor

from unisono.codecs import BucketMemory, Coder, Exchange, Gather, Sent
from unisono.codecs._sparse import chunked, spans, spread
from unisono_contrib.codecs.chunktopk import COUNT, ChunkTopK, PayloadLayout
from unisono_contrib.codecs.chunktopk.dct import from_frequencies, to_frequencies
from unisono_contrib.codecs.chunktopk.gaps import (
    ChunkCut,
    from_packed,
    from_unary,
    gaps_of,
    packed,
    padded,
    places_of,
    unary,
)
from unisono_contrib.codecs.chunktopk.levels import from_levels, two_levels


class ChunkTopKCoder(Coder):
    """Each replica's largest elements of each chunk, added up."""

    def __init__(self, member: ChunkTopK) -> None:
        self.member = member
        self._cuts: dict[tuple[Size, ...], ChunkCut] = {}  # by the shapes of a bucket

    def exchange(self, grad: Tensor, shapes: Sequence[Size], memory: BucketMemory) -> Exchange:
        layout = self.member.layout(shapes, grad.itemsize)
        if not layout.kept:
            yield Sent(lambda: grad)
            return grad.zero_()
        if self.member.dct:
            grad.copy_(to_frequencies(grad, shapes))
        cut = self._cut(tuple(shapes), grad.device)
        places = torch.cat(list(self._chosen(grad, shapes)))
        gaps = gaps_of(places, cut)
        high = unary(gaps >> layout.low)
        first = self._first(grad[places], gaps, len(high), layout, cut)
        firsts = yield Gather(first)
        # Told before, so that each replica's gaps take the bytes that they need and not what the worst ones would.
        lengths = firsts[:, :COUNT].contiguous().view(torch.int64).view(-1).tolist()
        seconds = yield Gather(torch.cat([high, high.new_zeros(max(lengths) - len(high))]))
        wire = self._wire(grad.dtype)
        chosen = lambda: spread(_values(first, layout, cut, wire), places, torch.zeros_like(grad))
        yield Sent(lambda: self._space(chosen(), shapes))
        grad.zero_()
        for row, more, length in zip(firsts, seconds, lengths, strict=True):
            low = from_packed(row[layout.lows :], layout.low, layout.padded)[: layout.kept]
            where = places_of((from_unary(more[:length]) << layout.low) + low, cut)
            spread(_values(row, layout, cut, wire), where, grad)
        return grad.copy_(self._space(grad, shapes)) if self.member.dct else grad

    def _space(self, x: Tensor, shapes: Sequence[Size]) -> Tensor:
        """Elements of what was chosen among."""
        return from_frequencies(x, shapes) if self.member.dct else x

    def _chosen(self, grad: Tensor, shapes: Sequence[Size]) -> Iterator[Tensor]:
        """Places in the bucket, in ascending order, of each parameter's chunks."""
        for begin, x in spans(grad, [shape.numel() for shape in shapes]):
            for begins, rows in chunked(x, self.member.chunk):
                indices = largest_of_rows(rows.abs(), self.member.kept(rows.shape[1]))
                yield indices.sort(1).values.add_(begins + begin).view(-1)

    def _first(self, values: Tensor, gaps: Tensor, more: int, layout: PayloadLayout, cut: ChunkCut) -> Tensor:
        """Bytes [layout.nbytes] of all but the unary parts of gaps, of which there are `more` bytes."""
        out = torch.zeros(layout.nbytes, dtype=torch.uint8, device=values.device)
        out[:COUNT].view(torch.int64).fill_(more)
        if layout.width:
            _plain(out, layout, self._wire(values.dtype)).copy_(values)
        else:
            codes, upper, ratios = two_levels(values, cut)
            out[COUNT : COUNT + 2 * layout.chunks].view(torch.bfloat16).copy_(upper)
            out[layout.ratios : layout.ratios + layout.chunks].copy_(ratios)
            out[layout.values : layout.lows].copy_(packed(padded(codes), 2))
        out[layout.lows :].copy_(packed(padded(gaps), layout.low))
        return out

    def _wire(self, dtype: torch.dtype) -> torch.dtype:
        """In which values of bytes of their own travel. dtype: of the gradient."""
        return torch.bfloat16 if self.member.values == "bf16" else dtype

    def _cut(self, shapes: tuple[Size, ...], device: torch.device) -> ChunkCut:
        if shapes not in self._cuts:
            begins, counts, begin = [], [], 0
            for shape in shapes:
                full, rest = divmod(shape.numel(), self.member.chunk)
                at = torch.arange(full + (rest > 0)) * self.member.chunk + begin
                kept = torch.full_like(at, self.member.top)
                kept[full:] = self.member.kept(rest)
                begins.append(at)
                counts.append(kept)
                begin += shape.numel()
            per_chunk, at = torch.cat(counts), torch.cat(begins)
            chunk_of = torch.arange(len(at)).repeat_interleave(per_chunk)
            firsts = per_chunk.cumsum(0) - per_chunk
            self._cuts[shapes] = ChunkCut(*(x.to(device) for x in (at, firsts, per_chunk, chunk_of)))
        return self._cuts[shapes]


def largest_of_rows(sizes: Tensor, kept: int) -> Tensor:
    """sizes [rows, n] → indices [rows, kept] of each row's largest, in no order; NaN is larger than any. By halves: of
    each pair of an element and the one half a row further the larger stays. The pairs of the largest elements are
    among the largest pairs, so that few elements are ever sorted: twice as fast as `topk` of 64 of 4,096."""
    half, rest = divmod(sizes.shape[1], 2)
    if rest or half < 4 * kept:
        return sizes.topk(kept, sorted=False).indices
    pairs = largest_of_rows(torch.maximum(sizes[:, :half], sizes[:, half:]), kept)
    both = torch.cat([pairs, pairs + half], 1)
    return both.gather(1, sizes.gather(1, both).topk(kept, sorted=False).indices)


def _plain(row: Tensor, layout: PayloadLayout, wire: torch.dtype) -> Tensor:
    """Values that are sent in bytes of their own, where they lie."""
    return row[layout.values : layout.values + layout.width * layout.kept].view(wire)


def _values(row: Tensor, layout: PayloadLayout, cut: ChunkCut, wire: torch.dtype) -> Tensor:
    """Values [kept] of what `_first` wrote."""
    if layout.width:
        return _plain(row, layout, wire)
    upper = row[COUNT : COUNT + 2 * layout.chunks].view(torch.bfloat16)
    ratios = row[layout.ratios : layout.ratios + layout.chunks]
    codes = from_packed(row[layout.values : layout.lows], 2, layout.padded)[: layout.kept]
    return from_levels(codes, upper, ratios, cut)
