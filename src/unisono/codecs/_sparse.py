"""The largest elements of a tensor, and what of them is sent."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Size, Tensor

from unisono.codecs import Exchange, Gather, Sent, Sum
from unisono.codecs._parcel import SPAN, Parcel, Sparse

SAMPLE = 1 << 15  # elements from which a threshold is told, at most
PIECE = 1 << 19  # elements that are looked at together
_EIGHT_BELOW = 0x0101010101010101
_CHANCE = 4.0  # standard deviations by which a sample may mislead: there are too few candidates once in 30,000 times
_ODD = 2 * 3 * 5 * 7 * 11 * 13  # what the widths of layers are made of


def largest(x: Tensor, kept: int) -> Tensor:
    """Places of the `kept` largest magnitudes of x [n], in ascending order; NaN is larger than any."""
    if kept == x.numel():
        return torch.arange(kept, device=x.device)
    return x.abs().topk(kept, sorted=False).indices.sort().values


def chunked(x: Tensor, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(places in x of their first elements [rows, 1], chunks [rows, length]) of all whole chunks of x [n], so many at a
    time that they stay in the CPU's cache; then what remains, as one shorter row. Views."""
    whole, rows = x.numel() // length * length, max(1, PIECE // length)
    begins = torch.arange(0, whole, length, device=x.device).unsqueeze(1)
    yield from zip(begins.split(rows), x[:whole].view(-1, length).split(rows), strict=True)
    if whole < x.numel():
        yield begins.new_full((1, 1), whole), x[whole:].unsqueeze(0)


def threshold(x: Tensor, kept: float, chance: float = 0.0) -> Tensor:
    """A magnitude that about `kept` elements of x [n] exceed, told from a sample of a 32nd of them or less: no dims.
    chance: standard deviations by which more may exceed it, so that hardly ever fewer do."""
    if not x.numel():
        return x.new_zeros(())
    sample = x[:: _stride(x.numel())].abs()
    rank = sample.numel() * kept / x.numel()
    rank = min(max(1, round(rank + chance * math.sqrt(rank))), sample.numel())
    return sample.topk(rank, sorted=False).values.min()


def _stride(numel: int) -> int:
    """From one element of a sample to the next: no width of a layer, or whole columns would never be seen."""
    stride = max(1, numel // SAMPLE, min(32, numel >> 12))
    while math.gcd(stride, _ODD) > 1:
        stride += 1
    return stride


def above(x: Tensor, least: Tensor) -> Tensor:
    """Places in x [n] of all magnitudes that are not up to `least`, in ascending order; NaN is one of them. Piece by
    piece, so that what is made on the way stays in the CPU's cache."""
    places = [_above(piece, least).add_(i * PIECE) for i, piece in enumerate(x.split(PIECE))]
    return torch.cat(places) if len(places) > 1 else places[0]


def _above(x: Tensor, least: Tensor) -> Tensor:
    # Compared in place and then made bytes: twice as fast as a comparison whose answers are bytes at once.
    below = x.abs().le_(least).to(torch.int8)
    whole = below.numel() // 8 * 8
    # Eight answers are one number: where few are above, most of the search is over eight at a time.
    eights = below[:whole].view(torch.int64).bitwise_xor_(_EIGHT_BELOW)
    groups = eights.nonzero().view(-1)
    inside = eights.index_select(0, groups).view(torch.bool).nonzero().view(-1)
    places = groups[inside >> 3].mul_(8).add_(inside.bitwise_and_(7))
    if whole == below.numel():
        return places
    return torch.cat([places, (below[whole:] == 0).nonzero().view(-1) + whole])


def sampled(x: Tensor, kept: int) -> tuple[Tensor, int]:
    """As `largest`, without sorting all: those above a threshold are compared. (places, how many of them mean
    something): where fewer elements than `kept` are not zero, the rest repeats the last place."""
    if x.numel() < SPAN or kept * 4 > x.numel():
        return largest(x, kept), kept
    least = threshold(x, kept, _CHANCE)
    places = above(x, least)
    if places.numel() < kept and least != 0:
        return largest(x, kept), kept
    return capped(x, places, kept)


def capped(x: Tensor, places: Tensor, kept: int) -> tuple[Tensor, int]:
    """Of the places `found` the `kept` largest, in ascending order; where there are fewer, the last place of x fills
    them up. (places [kept], how many mean something)."""
    if places.numel() > kept:
        least = x[places].abs_().topk(places.numel() - kept, largest=False, sorted=False).indices
        stays = torch.ones_like(places, dtype=torch.bool).index_fill_(0, least, False)
        return places.masked_select(stays), kept
    if places.numel() == kept:
        return places, kept
    fill = places.new_full((kept - places.numel(),), x.numel() - 1)
    return torch.cat([places, fill]), places.numel()


def spans(x: Tensor, numels: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """(begin, part) of each parameter in x [n]."""
    begin = 0
    for numel in numels:
        yield begin, x[begin : begin + numel]
        begin += numel


def packed(values: Tensor, places: Tensor, parcel: Parcel, base: Tensor | None = None) -> Tensor:
    """Bytes [parcel.nbytes]. values [kept], in their dtype. places [kept] in the bucket: ascending, or, with a base
    [kept], at most 65,535 above it."""
    out = torch.zeros(parcel.nbytes, dtype=torch.uint8, device=values.device)
    tallies, low = _views(out, parcel, values.dtype)[1:]
    out[: parcel.kept * parcel.width].view(values.dtype).copy_(values)
    if base is None:
        tallies.copy_(torch.bincount(places >> 16, minlength=parcel.spans))
        low.copy_(places.bitwise_and(SPAN - 1))
    else:
        low.copy_(places - base)
    return out


def unpacked(
    row: Tensor, parcel: Parcel, dtype: torch.dtype, base: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(values [kept], places [kept]) of what `packed` made."""
    values, tallies, low = _views(row, parcel, dtype)
    low = low.long().bitwise_and_(SPAN - 1)
    if base is None:
        begins = torch.arange(0, parcel.numel, SPAN, device=row.device)
        base = begins.repeat_interleave(tallies, output_size=parcel.kept)
    return values, low.add_(base)


def _views(flat: Tensor, parcel: Parcel, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Values, tallies and the places' low halves, where they lie."""
    values = flat[: parcel.kept * parcel.width].view(dtype)
    tallies = flat[parcel.tallies : parcel.tallies + 4 * parcel.spans].view(torch.int32)
    return values, tallies, flat[parcel.places : parcel.places + 2 * parcel.kept].view(torch.int16)


def spread(values: Tensor, places: Tensor, out: Tensor) -> Tensor:
    """out, of zeros, with the values [kept] added at their places [kept]."""
    return out.index_add_(0, places, values.to(out.dtype))


def added(
    rows: Tensor, parcel: Parcel, dtype: torch.dtype, out: Tensor, base: Tensor | None = None
) -> Tensor:
    """out, overwritten with the sum of all that rows [replicas, nbytes] hold, one after the other: the same bits
    everywhere."""
    out.zero_()
    for row in rows:
        values, places = unpacked(row, parcel, dtype, base)
        spread(values, places, out)
    return out


def met(
    member: Sparse,
    grad: Tensor,
    shapes: Sequence[Size],
    sent: Tensor,
    places: Tensor,
    parcel: Parcel,
    base: Tensor | None = None,
) -> Exchange:
    """The sum of what each replica sends: its elements `sent` [kept] at `places` [kept], given to all and added up in
    one order, and what goes whole, added up beside. Returns `grad`, overwritten."""
    gather, whole = Gather(packed(sent, places, parcel, base)), _whole(member, grad, shapes)
    if whole:
        rows, total = yield gather, Sum(torch.cat(whole))
    else:
        rows, total = (yield gather), grad[:0]

    def decoded() -> Tensor:
        out = spread(sent, places, grad.new_zeros(parcel.numel))
        for view, tensor in zip(_whole(member, out, shapes), whole, strict=True):
            view.copy_(tensor)
        return out

    yield Sent(decoded)
    out = added(rows, parcel, sent.dtype, grad, base)
    for view, part in zip(whole, total.split([x.numel() for x in whole]), strict=True):
        view.copy_(part)
    return out


def _whole(member: Sparse, flat: Tensor, shapes: Sequence[Size]) -> list[Tensor]:
    """Views of the parameters that go whole, in something as long as the bucket."""
    parts = zip(spans(flat, [shape.numel() for shape in shapes]), shapes, strict=True)
    return [x for (_, x), shape in parts if member.spared(shape)]


def finite_mark(body: Tensor) -> Tensor:
    """[1]: 0 where all of body [n] is finite, else NaN. It travels with what is sent, so that what overflowed where
    nothing is sent is not finite in the sum either."""
    return body.sum().mul(0).view(1)
