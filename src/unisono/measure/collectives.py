"""All-reduces between the ranks that are there, timed. Imports torch: rank side only."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from unisono.comm.device import synchronize
from unisono.comm.group import Group


def all_reduces(
    group: Group, sizes: Sequence[int], device: torch.device, least: float = 0.05
) -> list[tuple[int, float]]:
    """(bytes, seconds) of all-reduces in fp32: the median of about `least` seconds of calls."""
    timings: list[tuple[int, float]] = []
    for size in sizes:
        x = torch.zeros(max(1, size // 4 // group.size) * group.size, device=device)
        seconds = _seconds(group, lambda x=x: group.start_all_reduce(x).wait(), device, least)
        timings.append((size, seconds))
    return timings


def _seconds(group: Group, call: Callable[[], object], device: torch.device, least: float) -> float:
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
