"""What crosses `shard` in eight bits: rows of matrices in blocks that have a scale each (Wang et al., ZeRO++, 2023).

A block is `BLOCK` neighbours of one row, the dims behind the first laid end to end; it is sent as whole numbers of -127
to 127 and a float32 scale, largest / 127. No entry is off by more than half a scale, 1 / 254 of the largest of its
block. `shard` deals whole rows, so what a weight is rounded to does not depend on who holds it: one device that rounds
alike has the same numbers. Vectors, such as biases and norms, travel as they are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.plan.options import BLOCK


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a flat buffer: `rows` rows of `width` elements; whole: it travels as it is."""

    rows: int
    width: int
    whole: bool

    @property
    def numel(self) -> int:
        return self.rows * self.width

    @property
    def blocks(self) -> int:
        """Scales of the segment."""
        return 0 if self.whole else self.rows * math.ceil(self.width / BLOCK)


@dataclass(frozen=True, slots=True)
class EightBits:
    """Flat buffers [n] as bytes [m] and back. segments: of the buffer, one after the other."""

    segments: tuple[Segment, ...]

    @property
    def numel(self) -> int:
        """n"""
        return sum(segment.numel for segment in self.segments)

    def nbytes(self, itemsize: int) -> int:
        """m, for elements of `itemsize` bytes."""
        return sum(
            segment.numel * (itemsize if segment.whole else 1) + 4 * segment.blocks
            for segment in self.segments
        )

    def encode(self, x: Tensor) -> Tensor:
        """x [k, n] → uint8 [k, m]"""
        parts: list[Tensor] = []
        for segment, flat in zip(self.segments, x.split([s.numel for s in self.segments], 1), strict=True):
            if segment.whole:
                parts.append(flat.contiguous().view(torch.uint8))
                continue
            blocks = _blocks(flat.reshape(len(x) * segment.rows, segment.width))
            # In the dtype of the numbers, and rounded once: the same scale on every device.
            scale = (blocks.abs().amax(-1, keepdim=True) / 127).float()
            level = blocks / torch.where(scale == 0, 1.0, scale)
            codes = level.round_().clamp_(-127, 127).to(torch.int8).flatten(1)[:, : segment.width]
            parts.append(codes.reshape(len(x), segment.numel).view(torch.uint8))
            parts.append(scale.reshape(len(x), segment.blocks).view(torch.uint8))
        return torch.cat(parts, 1)

    def decode(self, code: Tensor, dtype: torch.dtype) -> Tensor:
        """uint8 [k, m] → [k, n]"""
        parts: list[Tensor] = []
        at = 0
        for segment in self.segments:
            size = segment.numel * (dtype.itemsize if segment.whole else 1)
            part, at = code[:, at : at + size], at + size
            if segment.whole:
                parts.append(part.reshape(-1).clone().view(dtype).view(len(code), -1))
                continue
            scales, at = code[:, at : at + 4 * segment.blocks], at + 4 * segment.blocks
            scale = (
                scales.reshape(-1)
                .clone()
                .view(torch.float32)
                .view(len(code) * segment.rows, math.ceil(segment.width / BLOCK), 1)
                .to(dtype)
            )
            blocks = _blocks(
                part.contiguous().view(torch.int8).view(len(code) * segment.rows, segment.width).to(dtype)
            )
            parts.append((blocks * scale).flatten(1)[:, : segment.width].reshape(len(code), segment.numel))
        return torch.cat(parts, 1)


def _blocks(rows: Tensor) -> Tensor:
    """[rows, width] → [rows, blocks, BLOCK], zeros behind the last."""
    missing = -rows.shape[1] % BLOCK
    if missing:
        rows = torch.nn.functional.pad(rows, (0, missing))
    return rows.view(len(rows), rows.shape[1] // BLOCK, BLOCK)


def segment_of(shape: Sequence[int], ranks: int) -> Segment:
    """What each of `ranks` ranks has in a buffer of a parameter of this shape, whose rows are dealt; padded alike."""
    rows = math.ceil(shape[0] / ranks) if shape else 1
    return Segment(rows, math.prod(shape[1:]), len(shape) < 2)


def through_eight_bits(x: Tensor) -> Tensor:
    """x, any shape, as it is after the wire."""
    segment = segment_of(x.shape, 1)
    if segment.whole:
        return x.clone()
    wire = EightBits((segment,))
    return wire.decode(wire.encode(x.reshape(1, -1)), x.dtype).view(x.shape)
