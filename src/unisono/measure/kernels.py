"""Single kernels on one rank's device: matrix products, memory traffic, the start of an operation."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from unisono.comm.device import is_apart, synchronize

_BESIDE_WAIT = 0.01  # seconds, beside which those of waiting for a GPU, some 20 µs, do not count


def seconds_of(call: Callable[[], object], device: torch.device, least: float = 0.05) -> float:
    """Median seconds of one call, which is repeated for at least `least` seconds and three times. On a GPU many calls
    share the time that it takes to wait for it."""
    call()
    took: list[float] = []
    calls = _fill(_timed(call, 1, device)) if is_apart(device) else 1
    end = time.perf_counter() + least
    while len(took) < 3 or time.perf_counter() < end:
        took.append(_timed(call, calls, device))
    return statistics.median(took)


def _timed(call: Callable[[], object], calls: int, device: torch.device) -> float:
    """Return seconds of one call, from `calls` calls in a row."""
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(device)
    return (time.perf_counter() - begun) / calls


def _fill(once: float) -> int:
    """Return how many calls take about `_BESIDE_WAIT` seconds, if one takes `once`."""
    return max(1, min(1000, round(_BESIDE_WAIT / max(once, 1e-9))))


def products(
    shapes: Sequence[tuple[int, int, int]], device: torch.device, dtype: torch.dtype
) -> list[tuple[int, int, int, float]]:
    """(rows, inner, columns, seconds) of each product (rows x inner) (inner x columns)."""
    timings = []
    for rows, inner, columns in shapes:
        a = torch.randn(rows, inner, device=device, dtype=dtype)
        b = torch.randn(inner, columns, device=device, dtype=dtype)
        timings.append((rows, inner, columns, seconds_of(lambda a=a, b=b: a @ b, device)))
    return timings


def copies(sizes: Sequence[int], device: torch.device) -> list[tuple[int, float]]:
    """(bytes read and written, seconds) of a copy of each size, in bytes."""
    timings = []
    for size in sizes:
        source = torch.zeros(size // 4, device=device)
        target = torch.zeros_like(source)
        timings.append((2 * size, seconds_of(lambda s=source, t=target: t.copy_(s), device)))
    return timings
