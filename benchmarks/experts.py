"""Experts dealt out, and experts kept alike: `python benchmarks/experts.py`, about two minutes on two cores.

Prints the losses of examples/moe.toml in float64 under plans that deal its experts in different ways, and the load of
the busiest expert after 300 steps with the bias that balances and without. Ranks are threads of this process.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.threads import context
from unisono.config import Recipe, load, resolve
from unisono.observe.span import Recorder
from unisono.train.build.build import build, feeds, place_of
from unisono.train.data.load import load as load_data
from unisono.train.step.train_step import train
from unisono.train.step.update import Report
from unisono_contrib.comm.threads import run as on_threads

ROOT = Path(__file__).parents[1]
PLANS = {
    "dp=1": 1,
    "ep=2 shard=2": 2,
    "ep=4 shard=4": 4,
    "ep=2 tp=2": 2,
    "ep=4 shard=2 tp=2": 4,
    "ep=2 tp=4": 4,
}
LAST = 20  # steps over which a load is the mean


def recipe(**changes: dict[str, Any]) -> Recipe:
    """examples/moe.toml with other keys, section by section."""
    told = load(ROOT / "examples" / "moe.toml").recipe
    return told.model_copy(
        update={name: getattr(told, name).model_copy(update=keys) for name, keys in changes.items()}
    )


def reports(told: Recipe, plan: str, ranks: int, steps: int) -> list[Report]:
    """What each step under this plan came to."""
    corpus = load_data(told.data, told.model)

    def live(rank: int) -> list[Report]:
        ctx = context(rank, ranks)
        resolved = resolve(told, plan, ranks)
        place = place_of(rank, ranks, rank, ctx.backend, 600.0)
        run = build(resolved.recipe, resolved.plan, place, corpus, Recorder(rank))
        feed, _ = feeds(resolved.recipe, resolved.plan, corpus, place.device)
        return list(train(run, feed, steps))

    return on_threads(ranks, live, join=ranks > 1, timeout=600.0)[0]


def losses(steps: int = 3) -> dict[str, list[float]]:
    """Plan → the losses of its first steps, in float64."""
    told = recipe(train={"dtype": "float64", "micro_batch": 2})
    return {plan: [r.loss for r in reports(told, plan, n, steps)] for plan, n in PLANS.items()}


def busiest(bias_rate: float, steps: int = 300) -> list[float]:
    """By layer: tokens of the busiest expert over the mean, on average over the last steps."""
    told = recipe(model={"bias_rate": bias_rate})
    rows = [r.says["router"]["busiest"] for r in reports(told, "dp=1", 1, steps)[-LAST:]]
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Losses under plans that deal experts, and their load.")
    parser.add_argument("--steps", type=int, default=300, help="of the runs that are asked for their load")
    given = parser.parse_args()
    print("losses of examples/moe.toml in float64")
    for plan, row in losses().items():
        print(f"  {plan:<20}", *(f"{loss:.15f}" for loss in row))
    rate = recipe().model.bias_rate
    print(f"tokens of the busiest expert over the mean, last {LAST} of {given.steps} steps, by layer")
    for name, value in ((f"bias_rate {rate}", rate), ("bias_rate 0", 0.0)):
        print(f"  {name:<20}", *(f"{load:.2f}" for load in busiest(value, given.steps)))


if __name__ == "__main__":
    main()
