"""What the guard costs: seconds of one check beside seconds of a step, and so the share at a period of N steps.

python benchmarks/guard.py                 # a GPT of 10 M parameters on dp=2, without accumulation: the dearest case
python benchmarks/guard.py --micros 4      # with accumulation one micro-batch of four is computed again
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from unisono.config import ModelConfig, Recipe, TrainConfig, resolve
from unisono.launch.nursery import Nursery


def prepare(argument: dict[str, Any]) -> Any:
    """In the helper: the data."""
    from unisono.train.data.load import load

    recipe = Recipe.model_validate_json(argument["recipe"])
    return load(recipe.data, recipe.model)


def main(ctx: Any, argument: dict[str, Any], corpus: Any) -> dict[str, Any]:
    """In each rank: steps without and with a check in turn, on one run; the differences are the check's."""
    from unisono.observe.span import Recorder
    from unisono.train.build import build, connect, feeds
    from unisono.train.guard import install
    from unisono.train.session import place_of
    from unisono.train.step import train_step

    resolved = resolve(Recipe.model_validate_json(argument["recipe"]), argument["plan"])
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, "gloo", 600.0)
    connect(place, ctx.store)
    run = build(resolved.recipe, resolved.plan, place, corpus, Recorder(ctx.rank))
    feed, _ = feeds(resolved.recipe, resolved.plan, corpus, place.device)
    check = install(run, 2, feed=feed)
    times: dict[str, list[float]] = {"step": [], "checked": [], "copies": []}
    for step in range(2 * argument["pairs"] + 2):
        leaves = feed.fetch(step, run.leaves)
        run.mesh.world.barrier()
        begun = time.perf_counter()
        train_step(run, leaves)
        run.mesh.world.barrier()
        if step >= 2:
            times["step" if step % 2 else "checked"].append(time.perf_counter() - begun)
        begun = time.perf_counter()
        check()
        times["copies"].append(time.perf_counter() - begun)
    parameters = sum(slot.master.numel() for slot in run.local.slots if not slot.alias)
    return {"parameters": parameters, **{name: statistics.median(v) for name, v in times.items()}}


def measure(plan: str, ranks: int, micros: int, pairs: int) -> dict[str, Any]:
    """One row: seconds, and the share of step time at the period that `--guard` takes by itself."""
    from unisono.train.guard import PERIOD

    model = ModelConfig(n_layer=5, n_head=8, d_model=400, context=128)
    recipe = Recipe(
        model=model, train=TrainConfig(global_batch=4 * ranks, micro_batch=4 // micros, steps=1000)
    )
    argument = {"recipe": recipe.model_dump_json(exclude_unset=True), "plan": plan, "pairs": pairs}
    with Nursery("guard:main", path=[str(Path(__file__).parent)]) as nursery:
        outcome = nursery.run(argument, ranks, 1, lambda rank, event: None, 600.0)
    if outcome.error is not None:
        raise outcome.error
    found = outcome.results[0] or {}
    extra = found["checked"] - found["step"]
    return {
        "plan": plan,
        "micros": micros,
        "parameters": found["parameters"],
        "step_s": found["step"],
        "check_s": extra,
        "copies_s": found["copies"],
        "period": PERIOD,
        "share": extra / found["step"] / PERIOD,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micros", type=int, choices=(1, 2, 4), default=1)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    row = measure(f"dp={given.ranks}", given.ranks, given.micros, given.pairs)
    if given.json:
        print(json.dumps({"schema_version": 1, "rows": [row]}))
    else:
        print(
            f"{row['plan']}, {row['parameters'] / 1e6:.1f} M parameters, micro-batches a rank: {row['micros']};"
            f" step {row['step_s'] * 1e3:.0f} ms, check {row['check_s'] * 1e3:.0f} ms"
            f" (checksums {row['copies_s'] * 1e3:.0f} ms); every {row['period']} steps: {row['share']:.2%}"
        )
