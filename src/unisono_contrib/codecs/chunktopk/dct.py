"""Parameters as frequencies of their tiles, of which few are large where neighbours are alike: the transform of DeMo
(Peng, Quesnelle and Kingma, "DeMo: Decoupled momentum optimization", 2024, arXiv 2411.19870).

A matrix is cut into tiles of 64 × 64 elements, and what is left at its edges into smaller ones, so that no shape is
worse off. Each tile becomes its discrete cosine transform (type II, orthonormal). Coefficients of a tile lie side by
side, whole tiles first, and there are as many as elements.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Size, Tensor

from unisono.codecs._sparse import spans
from unisono_contrib.codecs.chunktopk import SIDE


@cache
def basis(size: int) -> Tensor:
    """float64 [size, size], orthonormal: row k is the cosine of k half periods, which gives coefficient k."""
    k, n = torch.arange(size, dtype=torch.float64)[:, None], torch.arange(size, dtype=torch.float64)
    rows = (math.pi * k * (2 * n + 1) / (2 * size)).cos() * math.sqrt(2.0 / size)
    rows[0] /= math.sqrt(2.0)
    return rows


def to_frequencies(flat: Tensor, shapes: Sequence[Size]) -> Tensor:
    """The coefficients of parameters that lie side by side in `flat`, with these shapes."""
    return _each(flat, shapes, forth=True)


def from_frequencies(flat: Tensor, shapes: Sequence[Size]) -> Tensor:
    """What `to_frequencies` was given."""
    return _each(flat, shapes, forth=False)


def _each(flat: Tensor, shapes: Sequence[Size], forth: bool) -> Tensor:
    out = torch.zeros_like(flat)
    for shape, (begin, x) in zip(
        (s for s in shapes if s.numel()), spans(flat, [s.numel() for s in shapes if s.numel()]), strict=True
    ):
        rows = shape[0] if len(shape) > 1 else 1
        place = out[begin : begin + x.numel()]
        wide = x.float() if x.dtype.itemsize < 4 else x
        done = _coefficients(wide.view(rows, -1)) if forth else _elements(wide, rows)
        place.copy_(done.reshape(-1))
    return out


def _regions(rows: int, columns: int) -> Iterator[tuple[slice, slice, int, int]]:
    """(its rows, its columns, height and width of its tiles) of each part of a matrix that has tiles of one size."""
    whole = rows // SIDE * SIDE, columns // SIDE * SIDE
    for top, bottom, height in ((0, whole[0], SIDE), (whole[0], rows, rows - whole[0])):
        for left, right, width in ((0, whole[1], SIDE), (whole[1], columns, columns - whole[1])):
            if bottom > top and right > left:
                yield slice(top, bottom), slice(left, right), height, width


def _coefficients(x: Tensor) -> Tensor:
    """x [rows, columns] → [rows · columns]."""
    parts = []
    for down, across, height, width in _regions(*x.shape):
        region = x[down, across]
        tiles = region.reshape(len(region) // height, height, -1, width).transpose(1, 2)
        parts.append((_of(height, x) @ tiles @ _of(width, x).T).reshape(-1))
    return torch.cat(parts)


def _elements(flat: Tensor, rows: int) -> Tensor:
    """[rows · columns] → [rows, columns]."""
    columns = flat.numel() // rows
    out, at = flat.new_empty(rows, columns), 0
    for down, across, height, width in _regions(rows, columns):
        region = out[down, across]
        size = region.numel()
        tiles = flat[at : at + size].view(len(region) // height, -1, height, width)
        region.copy_((_of(height, flat).T @ tiles @ _of(width, flat)).transpose(1, 2).reshape(region.shape))
        at += size
    return out


def _of(size: int, like: Tensor) -> Tensor:
    return basis(size).to(like)
