"""Ways to do one thing, timed in turns on all ranks. Imports torch: rank side only."""

from collections.abc import Callable, Mapping

import torch

from unisono_contrib.comm.probe import agreed, timed

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
    pilot = agreed([max(1e-7, timed(ways[name], device=device)) for name in names])
    turns = rounds or min(MOST, max(FEWEST, round(least * len(names) / sum(pilot))))
    took: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(turns):
        for at in range(len(names)):
            name = names[(turn + at) % len(names)]
            took[name].append(timed(ways[name], device=device))
    flat = agreed([seconds for name in names for seconds in took[name]])
    return {name: flat[i * turns : (i + 1) * turns] for i, name in enumerate(names)}
