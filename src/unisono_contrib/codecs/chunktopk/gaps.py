"""Ascending places as the gaps between them, in Golomb-Rice code (Golomb, "Run-length encodings", 1966; Rice & Plaunt,
"Adaptive variable-length coding", 1971).

A gap of g elements is its quotient ⌊g / 2^low⌋ in unary, so many zeros and a one, and its `low` lowest bits as they
are. The two parts lie in streams of their own, so that all gaps are read and written at once: the low bits of every gap
begin at a place that is known, and the ones of the unary stream are found by a search. No loop goes over elements.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.codecs._packing import pack, unpacked
from unisono_contrib.codecs.chunktopk import up


@dataclass(frozen=True, slots=True)
class ChunkCut:
    """How a bucket is cut into chunks. begins [chunks]: the first element of each. firsts [chunks]: the number of the
    first element that each sends. counts [chunks]: how many it sends. chunk_of [kept]: whose each one is."""

    begins: Tensor
    firsts: Tensor
    counts: Tensor
    chunk_of: Tensor


def gaps_of(places: Tensor, cut: ChunkCut) -> Tensor:
    """places [kept], ascending in each chunk → how many elements of the chunk are skipped before each."""
    before = torch.cat([places.new_zeros(1), places[:-1]])
    before[cut.firsts] = cut.begins - 1
    return places - before - 1


def places_of(gaps: Tensor, cut: ChunkCut) -> Tensor:
    """What `gaps_of` was given."""
    steps = gaps + 1
    ends = steps.cumsum(0)
    bases = cut.begins - 1 - (ends[cut.firsts] - steps[cut.firsts])
    return ends.add_(bases[cut.chunk_of])


def unary(quotients: Tensor) -> Tensor:
    """quotients [kept], not negative → bytes: of each, so many zeros and a one; zeros follow."""
    ends = (quotients + 1).cumsum(0).sub_(1)
    bits = torch.zeros(up(int(ends[-1]) + 1), dtype=torch.uint8, device=quotients.device)
    bits[ends] = 1
    return packed(bits, 1)


def from_unary(codes: Tensor) -> Tensor:
    """What `unary` was given."""
    ends = unpacked(codes.view(1, -1), 1).view(-1).nonzero().view(-1)
    return ends.diff(prepend=ends.new_full((1,), -1)).sub_(1)


def packed(x: Tensor, bits: int) -> Tensor:
    """x [n], numbers below 2^bits, n a multiple of 64 → bytes [n · bits / 8]. Eight, four, two and one bit at a time,
    the lowest first, since these fit into bytes."""
    parts = []
    for width in _widths(bits):
        codes = torch.empty(len(x) * width // 8, dtype=torch.uint8, device=x.device)
        pack(x.bitwise_and((1 << width) - 1).to(torch.uint8).view(1, -1), codes.view(1, -1), width)
        parts.append(codes)
        x = x >> width
    return torch.cat(parts) if parts else x.new_empty(0, dtype=torch.uint8)


def from_packed(codes: Tensor, bits: int, numel: int) -> Tensor:
    """codes [numel · bits / 8] → [numel] int64: what `packed` was given."""
    out, shift = torch.zeros(numel, dtype=torch.int64, device=codes.device), 0
    for width in _widths(bits):
        part, codes = codes[: numel * width // 8], codes[numel * width // 8 :]
        out.bitwise_or_(unpacked(part.view(1, -1), width).view(-1).long() << shift)
        shift += width
    return out


def _widths(bits: int) -> list[int]:
    """5 → [4, 1]; 12 → [8, 4]."""
    return [8] * (bits // 8) + [width for width in (4, 2, 1) if bits & width]


def padded(x: Tensor) -> Tensor:
    """x [n] with zeros up to a multiple of 64."""
    return torch.cat([x, x.new_zeros(up(len(x)) - len(x))])
