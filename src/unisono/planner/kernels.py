"""Seconds of single kernels on one device."""

from dataclasses import dataclass
from math import ceil
from typing import Annotated

from unisono.planner.machines.cluster import Device, Source
from unisono.planner.stack import Stack

_TILES = Source("specification", "cuBLAS's largest kernels for half precision")
TILE_ROWS: Annotated[int, _TILES] = 256
TILE_COLUMNS: Annotated[int, _TILES] = 128
_BLENDED = Source("fitted", "vTrain, 2024, 250 single-node rows: of 2, 3, 4, 6 and 12 the least mean error")
# Exponent with which two bounds that are near each other both hurt. Single products do not tell one from another.
BLEND: Annotated[float, _BLENDED] = 4.0


@dataclass(frozen=True, slots=True)
class Chip:
    """A device under a stack, in one dtype: what kernels are priced with.

    rate: FLOP/s; traffic: bytes/s that elementwise kernels reach; item: bytes of an element.
    """

    rate: float
    traffic: float
    item: int
    units: int
    efficiency: float
    depth: float
    wave: float


def chip(device: Device, stack: Stack, dtype: str, item: int) -> Chip:
    """A kernel's beginning and end take as long in any dtype, so `depth`, which is known for half precision, is less
    where the main loop is slower."""
    slower = min(1.0, device.flops(dtype) / device.flops("bf16"))
    # Devices differ in the share of their peak that any product reaches.
    reach = device.best / device.flops("bf16") / stack.best if device.best and stack.best else 1.0
    return Chip(
        rate=device.flops(dtype),
        traffic=device.bandwidth * stack.elementwise,
        item=item,
        units=device.units,
        efficiency=min(1.0, stack.matmul * reach),
        depth=stack.depth * slower,
        wave=stack.wave,
    )


def matmul(
    on: Chip, rows: float, inner: float, columns: float, batch: float = 1.0, read: float | None = None
) -> float:
    """Seconds of `batch` products (rows x inner) (inner x columns). read: elements of all the left factors in memory,
    where they are fewer, as a convolution's are.

    Arithmetic at the rate that full tiles reach, less where the last wave leaves multiprocessors idle and where the
    inner dimension is short; memory traffic beside it; the larger of both, softly.
    """
    flops = 2.0 * batch * rows * inner * columns
    share = 1.0
    if on.units:
        # Parts of tiles count as such: rounded up, a row more would fill more units and make a product faster.
        tiles = batch * max(1.0, rows / TILE_ROWS) * max(1.0, columns / TILE_COLUMNS)
        share = tiles / (ceil(tiles / on.units) * on.units)
    compute = flops / (on.rate * on.efficiency * share**on.wave) * (1.0 + on.depth / inner)
    moved = on.item * batch * (rows * inner + inner * columns + rows * columns)
    if read is not None:
        moved -= on.item * (batch * rows * inner - read)
    return soft_max(compute, moved / on.traffic)


def elementwise(on: Chip, moved: float) -> float:
    """Seconds of kernels that read and write `moved` bytes in all."""
    return moved / on.traffic


def soft_max(a: float, b: float) -> float:
    """The larger, and up to a fifth more where both are alike: two bounds that are near each other both hurt."""
    if a <= 0.0 or b <= 0.0:
        return max(a, b)
    return float((a**BLEND + b**BLEND) ** (1.0 / BLEND))
