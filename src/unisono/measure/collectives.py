"""Collectives of the house, timed on the ranks that are there."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unisono.comm.device import synchronize
from unisono.comm.group import Group

OPS = ("all_reduce", "shared_sum", "all_gather", "reduce_scatter", "message")


def timed(
    group: Group, sizes: Sequence[int], device: torch.device, least: float = 0.05
) -> list[tuple[str, int, float]]:
    """(operation, bytes in all, seconds) over the group, in fp32: all_reduce sums as many bytes as every rank has, and
    so does shared_sum, in a `Group.buffer`, where ranks see each other's memory; all_gather and reduce_scatter end or
    begin with as many; a message goes from one member to the next and back."""
    found: list[tuple[str, int, float]] = []
    for size in sizes:
        count = max(1, size // 4 // group.size) * group.size
        whole, part = torch.zeros(count, device=device), torch.zeros(count // group.size, device=device)
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda x=whole: group.start_all_reduce(x).wait(),
            "all_gather": lambda x=part: group.all_gather(x),
            "reduce_scatter": lambda x=whole: group.reduce_scatter(x),
            "message": lambda x=whole: _there_and_back(group, x),
        }
        if group.near(device):
            buffer = group.buffer(count, whole)
            calls["shared_sum"] = lambda x=buffer: group.start_all_reduce(x).wait()
        for op, call in calls.items():
            seconds = _seconds(group, call, device, least)
            found.append((op, size, seconds / 2 if op == "message" else seconds))
    return found


def _there_and_back(group: Group, x: Tensor) -> None:
    """Between the first two members; the others wait for nobody."""
    if group.index == 0:
        group.start_send(x, 1).wait()
        group.start_recv(x, 1).wait()
    elif group.index == 1:
        group.start_recv(x, 0).wait()
        group.start_send(x, 0).wait()


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
