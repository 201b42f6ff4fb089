"""What it costs a loop of the user's own that its ranks are watched, as ratios of step time.

python benchmarks/watching.py                             # the loop of examples/own_loop.py on two ranks
python benchmarks/watching.py --width 1024                # with a model of 2.1 M parameters

later    steps with a look at replicas and at where gradients came from, over steps without: blocks in turn, the median
         of the pairs' ratios with its 90 % interval
first    a step in which all is followed (the first two of a run), over one of later: the median of fresh jobs
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from axes import interval

from unisono.launch.fork_server import ForkServer

FRESH = 5


def main(ctx: Any, argument: dict[str, Any], _: Any) -> dict[str, Any]:
    """In each rank."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    import unisono

    job = unisono.init("dp=-1", context=ctx)
    points = torch.rand(960, 2) * 4 - 2
    data = torch.utils.data.TensorDataset(points, (points.norm(dim=1) * 2).long().clamp(max=3))

    def trained(steps: int) -> Any:
        width = argument["width"]
        model = nn.Sequential(
            nn.Linear(2, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 4)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = torch.utils.data.DataLoader(data, batch_size=96)
        model, optimizer, loader = job.prepare(model, optimizer, loader)
        batches = list(loader)

        def step(number: int) -> float:
            begun = time.perf_counter()
            x, y = batches[number % len(batches)]
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            return time.perf_counter() - begun

        return step, [step(number) for number in range(steps)]

    fresh = [trained(12)[1] for _ in range(FRESH)]
    first = [sum(times[:2]) / 2 / statistics.median(times[4:]) for times in fresh]
    step, _ = trained(64)
    gradients = job._prepared[-1].gradients
    watched = gradients.meet_others, gradients._replicas.due
    pairs: list[float] = []
    for number in range(argument["pairs"]):
        seconds = {}
        for on in (False, True) if number % 2 else (True, False):
            gradients.meet_others = watched[0] if on else lambda looking: None
            gradients._replicas.due = watched[1] if on else lambda: False
            job.mesh.world.barrier()
            seconds[on] = sum(step(n) for n in range(argument["length"]))
        pairs.append(seconds[True] / seconds[False])
    return {"pairs": pairs, "first": first, "step": seconds[True] / argument["length"]}


def prepare(argument: dict[str, Any]) -> None:
    """In the helper that ranks are forked from."""


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--width", type=int, default=64)
    flags.add_argument("--pairs", type=int, default=30)
    flags.add_argument("--length", type=int, default=80, help="steps of a block")
    flags.add_argument("--ranks", type=int, default=2)
    given = vars(flags.parse_args())
    with ForkServer("watching:main", path=[str(Path(__file__).parent)]) as nursery:
        outcome = nursery.run(given, given["ranks"], 1, lambda rank, event: None, 600.0, "gloo")
    if outcome.error is not None:
        raise outcome.error
    results = [one for one in outcome.results if one is not None]
    pairs = [max(one) for one in zip(*(result["pairs"] for result in results), strict=True)]
    low, high = interval(sorted(pairs))
    first = statistics.median(max(one) for one in zip(*(result["first"] for result in results), strict=True))
    print(f"steps of {results[0]['step'] * 1e3:.2f} ms, width {given['width']}, {given['ranks']} ranks")
    print(f"later {statistics.median(pairs):.3f}, 90 % within {low:.3f} .. {high:.3f}")
    print(f"first {first:.1f}")
