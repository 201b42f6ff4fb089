"""Seconds on ranks: of single kernels (matrix products, copies), and of all-reduces between all ranks."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from unisono.comm.device import is_apart, synchronize
from unisono.comm.group import Group

_BESIDE_WAIT = 0.01  # seconds, beside which those of waiting for a GPU, some 20 µs, do not count


def seconds_of(call: Callable[[], object], device: torch.device, least: float = 0.05) -> float:
    """Median seconds of one call, which is repeated for at least `least` seconds and three times. On a GPU many calls
    share the time that it takes to wait for it."""
    call()
    took: list[float] = []
    calls = round(_BESIDE_WAIT / max(_timed(call, 1, device), 1e-9)) if is_apart(device) else 1
    calls = max(1, min(1000, calls))
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


def all_reduces(
    group: Group, sizes: Sequence[int], device: torch.device, least: float = 0.05
) -> list[tuple[int, float]]:
    """(bytes, seconds) of all-reduces in fp32: the median of about `least` seconds of calls."""
    timings: list[tuple[int, float]] = []
    for size in sizes:
        x = torch.zeros(max(1, size // 4 // group.size) * group.size, device=device)
        seconds = _together(group, lambda x=x: group.start_all_reduce(x).wait(), device, least)
        timings.append((size, seconds))
    return timings


def _together(group: Group, call: Callable[[], object], device: torch.device, least: float) -> float:
    """Median of single calls that all begin together; how many is agreed on, so that nobody waits for a call that
    another does not make."""
    call()
    once = torch.tensor([_once(group, call, device)], device=device)
    group.all_reduce(once, torch.distributed.ReduceOp.MAX)
    took = []
    for _ in range(min(50, max(5, round(least / once.item())))):
        took.append(_once(group, call, device))
    longest = torch.tensor([statistics.median(took)], device=device)
    return float(group.all_reduce(longest, torch.distributed.ReduceOp.MAX).item())


def _once(group: Group, call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, which all begin together; a GPU is waited for."""
    group.barrier()
    synchronize(device)
    begun = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - begun
