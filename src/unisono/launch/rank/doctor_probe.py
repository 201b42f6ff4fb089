"""What `doctor` lets two ranks do: sum together, look for GPUs. Imports torch: rank side only."""

import time
from typing import Any

import torch
import torch.distributed as dist

from unisono.comm import device
from unisono.launch.context import RankContext

SMALL, LARGE = 1 << 10, 4 << 20
"""Elements of float32: 4 KiB for latency, 16 MiB for bandwidth."""


def entry(ctx: RankContext, argument: dict[str, Any], shared: None) -> dict[str, Any]:
    """All-reduce on Gloo between the ranks: `small_ms` and `large_ms` are medians, `right` says whether sums are."""
    dist.init_process_group("gloo", store=ctx.store, rank=ctx.rank, world_size=ctx.world)
    x = torch.full((SMALL,), float(ctx.rank + 1))
    dist.all_reduce(x)
    right = bool((x == ctx.world * (ctx.world + 1) / 2).all())
    return {
        "right": right,
        "small_ms": _median_ms(SMALL, argument["small"]),
        "large_ms": _median_ms(LARGE, argument["large"]),
        "built": sorted(device.built()),
        "torch": torch.__version__,
        "gpus": device.names(),
        "software": device.software(),
    }


def _median_ms(elements: int, times: int) -> float:
    x = torch.zeros(elements)
    taken = []
    for _ in range(times):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(x)
        taken.append(time.perf_counter() - began)
    return sorted(taken)[len(taken) // 2] * 1e3
