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
_A100 = Source(
    "specification", "312 TFLOP/s in half precision on 108 multiprocessors; NVIDIA A100 data sheet"
)
# FLOP/s of one multiprocessor of the device that stacks' `depth` was fitted on.
UNIT_RATE: Annotated[float, _A100] = 312e12 / 108
# Exponent with which two bounds that are near each other both hurt. Single products do not tell one from another.
BLEND: Annotated[float, _BLENDED] = 4.0


@dataclass(frozen=True, slots=True)
class Chip:
    """A device under a stack, in one dtype: what kernels are priced with.

    rate: FLOP/s; traffic: bytes/s that elementwise kernels reach; item: bytes of an element; efficiency, attention:
    shares of the rate that large products, and fused attention, keep up.
    """

    rate: float
    traffic: float
    item: int
    units: int
    efficiency: float
    depth: float
    wave: float
    attention: float = 1.0


def chip(device: Device, stack: Stack, dtype: str, item: int) -> Chip:
    """A kernel's beginning and end take as long in any dtype and on any device, so `depth`, which is known for half
    precision on an A100, is less where the main loop of one multiprocessor is slower, and more where it is faster."""
    rate = device.flops(dtype)
    pace = rate / device.units / UNIT_RATE if device.units else min(1.0, rate / device.flops("bf16"))
    return Chip(
        rate=rate,
        traffic=device.bandwidth * stack.elementwise,
        item=item,
        units=device.units,
        efficiency=min(1.0, stack.matmul * device.products),
        depth=stack.depth * pace,
        wave=stack.wave,
        attention=min(1.0, stack.attention * device.attention),
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
