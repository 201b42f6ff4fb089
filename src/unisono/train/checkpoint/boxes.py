"""A box is a rectangular part of a logical tensor: where it starts and how far it goes in each dim."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

Extent = tuple[tuple[int, ...], tuple[int, ...]]  # (start, shape)


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


def overlap(one: Extent, other: Extent) -> bool:
    """Whether two non-empty boxes share an element."""
    return all(a < b + b_size and b < a + a_size for a, a_size, b, b_size in zip(*one, *other, strict=True))


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
    dims = range(len(full))
    # Sweep along the dim that is cut most: there most pairs are told apart by the order alone.
    dim = max(dims, key=lambda d: len({start[d] for start, _ in boxes}), default=None)
    if dim is None:
        return "it is saved more than once"
    ordered = sorted(boxes, key=lambda box: box[0][dim])
    for index, one in enumerate(ordered):
        stop = one[0][dim] + one[1][dim]
        for other in ordered[index + 1 :]:
            if other[0][dim] >= stop:
                break
            if overlap(one, other):
                return f"blocks at {list(one[0])} and {list(other[0])} overlap"
    return ""
