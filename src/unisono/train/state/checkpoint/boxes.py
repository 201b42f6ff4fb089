"""A box is a rectangular part of a logical tensor: where it starts and how far it goes in each dim."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod

import torch

Extent = tuple[tuple[int, ...], tuple[int, ...]]  # (start, shape)
_PAIRS = 64  # pairs of boxes that are looked at, for each box


@dataclass(frozen=True)
class Box:
    """One box of one logical tensor, as it lies on this rank.

    `name` is the full logical name ("model/blocks.0.attn.qkv.weight"), the same under every plan; `full_shape` the
    shape of the whole tensor; `start` the box's offset in it; `tensor` the box itself (any device, any strides,
    possibly empty). Exactly one rank has `saved=True` for any element.

    Raises ValueError if the box does not lie inside the full tensor.
    """

    name: str
    full_shape: tuple[int, ...]
    start: tuple[int, ...]
    tensor: torch.Tensor
    saved: bool = True

    def __post_init__(self) -> None:
        shape = tuple(self.tensor.shape)
        if not inside(self.full_shape, self.start, shape):
            raise ValueError(
                f"piece {self.name!r}: box {shape} at {self.start} does not lie in the tensor {self.full_shape}"
            )


def inside(full: Sequence[int], start: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether the box lies in a tensor of shape `full`."""
    return len(full) == len(start) == len(shape) and all(
        at >= 0 and size >= 0 and at + size <= limit
        for limit, at, size in zip(full, start, shape, strict=True)
    )


def overlap(first: Extent, other: Extent) -> bool:
    """Whether two non-empty boxes share an element."""
    return all(a < b + b_size and b < a + a_size for a, a_size, b, b_size in zip(*first, *other, strict=True))


def tiling_fault(full: Sequence[int], boxes: Sequence[Extent]) -> str:
    """What keeps non-empty boxes from tiling the tensor: "" if each element lies in exactly one of them.

    Boxes that are disjoint and inside fill the tensor if and only if their volumes add up to its own.
    """
    for start, shape in boxes:
        if not inside(full, start, shape) or not prod(shape):
            return f"box {list(shape)} at {list(start)} does not lie in the tensor {list(full)}"
    covered, volume = sum(prod(shape) for _, shape in boxes), prod(full)
    if covered < volume:
        return f"{volume - covered} of its {volume} elements are in no block"
    if len(boxes) < 2:
        return ""
    if not full:
        return "it is saved more than once"
    return _overlapping(boxes, range(len(full)))


def _overlapping(boxes: Sequence[Extent], dims: range) -> str:
    """Which two boxes overlap, "" if none do. Cuts right through, which are all that plans make, tell most apart; of
    the others so few pairs are looked at that no manifest takes for ever."""
    groups = [list(boxes)]
    for dim in dims:
        groups = [part for group in groups for part in _told_apart(group, dim)]
    left = _PAIRS * len(boxes)
    for first, other in (pair for group in groups for pair in combinations(group, 2)):
        if overlap(first, other):
            return f"blocks at {list(first[0])} and {list(other[0])} overlap"
        left -= 1
        if not left:
            return "it is cut as no plan cuts"
    return ""


def _told_apart(boxes: list[Extent], dim: int) -> Iterator[list[Extent]]:
    """The boxes between one cut right through `dim` and the next."""
    group: list[Extent] = []
    end = 0
    for box in sorted(boxes, key=lambda box: box[0][dim]):
        start, size = box[0][dim], box[1][dim]
        if group and start >= end:
            yield group
            group = []
        group.append(box)
        end = max(end, start + size)
    yield group
