"""What a sum over the replicas costs here: measured between them, the same numbers on every rank."""

import time

import torch

from unisono.comm.group import Group

SMALL, TIMES = 1 << 10, 3  # bytes; how often each size is tried


def measured_link(group: Group, device: torch.device, nbytes: int = 1 << 20) -> tuple[float, float]:
    """(seconds that a sum takes before its bytes count, bytes of gradients that are summed in a second): from sums of
    1 KiB and of `nbytes`, the quickest of three each, of the slowest rank. Every member calls it, or it hangs."""
    if group.size == 1:
        return 0.0, float("inf")
    small = _seconds(group, torch.zeros(SMALL // 4, device=device))
    large = _seconds(group, torch.zeros(max(nbytes, 2 * SMALL) // 4, device=device))
    took = group.all_gather(torch.tensor([[small, large]], dtype=torch.float64, device=device))
    small, large = took.max(0).values.tolist()
    return small, (nbytes - SMALL) / max(large - small, 1e-9)


def _seconds(group: Group, x: torch.Tensor) -> float:
    quickest = float("inf")
    for _ in range(TIMES):
        group.barrier()
        begun = time.perf_counter()
        group.start_all_reduce(x).wait()
        quickest = min(quickest, time.perf_counter() - begun)
    return quickest
