"""Ways to do one thing, timed in turns on all ranks. Imports torch: rank side only."""

import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from unisono.comm.device import synchronize

FEWEST, MOST = 5, 200


def in_turns(
    ways: Mapping[str, Callable[[], object]], device: torch.device, least: float, rounds: int = 0
) -> dict[str, list[float]]:
    """Seconds of each way in each turn, of the slowest rank. All begin a call together, in turns that begin elsewhere
    each time, until each way has had about `least` seconds, or for `rounds` turns if that is above 0. Every rank calls
    it with the same ways, or it hangs."""
    names = list(ways)
    for name in names:  # connections are made, memory is touched
        ways[name]()
    pilot = agreed([max(1e-7, _once(ways[name], device)) for name in names])
    turns = rounds or min(MOST, max(FEWEST, round(least * len(names) / sum(pilot))))
    took: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(turns):
        for at in range(len(names)):
            name = names[(turn + at) % len(names)]
            took[name].append(_once(ways[name], device))
    flat = agreed([seconds for name in names for seconds in took[name]])
    return {name: flat[i * turns : (i + 1) * turns] for i, name in enumerate(names)}


def agreed(numbers: list[float]) -> list[float]:
    """The greatest that a rank has, one by one."""
    if not dist.is_initialized():
        return numbers
    box = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return box.tolist()


def together() -> None:
    """Returns when all ranks are here."""
    if dist.is_initialized():
        dist.barrier()


def _once(call: Callable[[], object], device: torch.device) -> float:
    together()
    synchronize(device)
    begun = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - begun
