"""What saving beside training costs: turns of steps with an asynchronous checkpoint beside turns without.

python benchmarks/checkpoint_stall.py                    # a GPT of 10 M parameters on dp=2, a checkpoint each 50 steps
python benchmarks/checkpoint_stall.py --every 20 --plan "shard=2"
python benchmarks/checkpoint_stall.py --mirror           # and a copy of each in a second folder

A turn is `every` steps on one run, without a save; the next one begins with a save, and ends when that is whole on
disk. Printed: the median over pairs of turns of what the save added, in % of the steps; the longest step of a turn with
a save, the save's own call in it; how long that call held the loop; and the processor time that a save took, by its
call and by its thread, in % of that of the steps: what it costs where all cores are busy, and what a loaded machine
changes least.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from itertools import pairwise
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
    """In each rank: turns with and without, one after the other, on one run."""
    from unisono.observe.span import Recorder
    from unisono.train.build import build, connect, feeds
    from unisono.train.checkpoint import Saver
    from unisono.train.checkpoint.mirror import Mirroring, place_at
    from unisono.train.saving import Saving
    from unisono.train.session import place_of
    from unisono.train.state import kept_of, pieces_of
    from unisono.train.step import train_step

    resolved = resolve(Recipe.model_validate_json(argument["recipe"]), argument["plan"], ctx.world)
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, "gloo", 600.0)
    connect(place, ctx.store)
    run = build(resolved.recipe, resolved.plan, place, corpus, Recorder(ctx.rank))
    feed, _ = feeds(resolved.recipe, resolved.plan, corpus, place.device)
    folder, notes = Path(argument["folder"]) / "run", list[str]()
    mirror = None
    if argument["mirror"] and ctx.rank == 0:
        mirror = Mirroring(place_at(str(Path(argument["folder"]) / "mirror"), folder), keep=2)
    saver = Saver(folder, ctx.rank, ctx.world, token=ctx.run_token, keep=2)
    saving = Saving(saver, run.mesh.world, place.device, notes.append, mirror)

    def turn(saves: bool) -> dict[str, float]:
        run.mesh.world.barrier()
        begun, laps, call, call_cpu = time.perf_counter(), list[float](), 0.0, 0.0
        cpu = time.process_time()
        for number in range(argument["every"]):
            lap, own = time.perf_counter(), time.thread_time()
            if saves and number == 0:
                saving.settle()
                pieces = [*pieces_of(run), *kept_of(run)]
                saving.save(run.step, pieces, {"step": run.step}, blocking=False, last=False)
                call, call_cpu = time.perf_counter() - lap, time.thread_time() - own
            train_step(run, feed.fetch(run.step, run.leaves))
            saving.poll()
            laps.append(time.perf_counter() - lap)
        stepped = time.perf_counter() - begun
        if saves:
            saving.settle()
        return {"steps": stepped, "all": time.perf_counter() - begun, "worst": max(laps), "call": call,
                "call_cpu": call_cpu, "cpu": time.process_time() - cpu,
                "step": statistics.median(laps)}  # fmt: skip

    turn(True)  # buffers are made, files are found
    turns = [(turn(False), turn(True)) for _ in range(argument["pairs"])]
    saving.close()
    parameters = sum(slot.master.numel() for slot in run.local.slots if not slot.alias)
    return {"parameters": parameters, "turns": turns, "notes": notes}


def measure(plan: str, ranks: int, every: int, pairs: int, mirror: bool) -> dict[str, Any]:
    model = ModelConfig(n_layer=5, n_head=8, d_model=400, context=128)
    recipe = Recipe(model=model, train=TrainConfig(global_batch=4 * ranks, micro_batch=4, steps=100_000))
    folder = tempfile.mkdtemp(prefix="stall")
    argument = {
        "recipe": recipe.model_dump_json(exclude_unset=True), "plan": plan, "every": every, "pairs": pairs,
        "folder": folder, "mirror": mirror,
    }  # fmt: skip
    try:
        with Nursery("checkpoint_stall:main", path=[str(Path(__file__).parent)]) as nursery:
            outcome = nursery.run(argument, ranks, 1, lambda rank, event: None, 3600.0)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if outcome.error is not None:
        raise outcome.error
    found = outcome.results[0] or {}
    without, with_ = zip(*found["turns"], strict=True)
    shares = [b["all"] / a["all"] - 1 for a, b in found["turns"]]
    step = statistics.median(a["step"] for a in without)
    return {
        "plan": plan,
        "every": every,
        "parameters": found["parameters"],
        "step_s": step,
        "stall_share": statistics.median(shares),
        "spread": (min(shares), max(shares)),
        "noise": statistics.median(abs(a["all"] / b["all"] - 1) for a, b in pairwise(without))
        if pairs > 1
        else 0.0,
        "cpu_share": statistics.median(b["cpu"] for b in with_) / statistics.median(a["cpu"] for a in without)
        - 1,
        "call_s": statistics.median(b["call"] for b in with_),
        "call_cpu_s": statistics.median(b["call_cpu"] for b in with_),
        "worst_with_s": max(b["worst"] for b in with_),
        "worst_without_s": max(a["worst"] for a in without),
        "notes": found["notes"],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", default="dp=2")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--mirror", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    row = measure(given.plan, given.ranks, given.every, given.pairs, given.mirror)
    if given.json:
        print(json.dumps({"schema_version": 1, "rows": [row]}))
    else:
        low, high = row["spread"]
        print(
            f"{row['plan']}, {row['parameters'] / 1e6:.1f} M parameters, a checkpoint each {row['every']} steps of"
            f" {row['step_s'] * 1e3:.0f} ms\n"
            f"stall      {row['stall_share']:.2%} of the steps (pairs: {low:.2%} to {high:.2%}; turns without a save"
            f" differ by {row['noise']:.2%})\n"
            f"the call   {row['call_s'] * 1e3:.0f} ms, {row['call_cpu_s'] * 1e3:.0f} ms of processor time,"
            f" {row['call_s'] / row['step_s'] / row['every']:.2%} of the steps\n"
            f"processor  {row['cpu_share']:.2%} more of it on the rank that writes\n"
            f"worst step {row['worst_with_s'] * 1e3:.0f} ms with a save, {row['worst_without_s'] * 1e3:.0f} ms without"
        )
        for note in row["notes"]:
            print(f"note       {note}")
