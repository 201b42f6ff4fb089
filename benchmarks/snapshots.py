"""What snapshots of ranks cost a step: blocks of steps with them and without, in turn, on one run.

python benchmarks/snapshots.py                    # a GPT of 10 M parameters on shard=2, as often as by themselves
python benchmarks/snapshots.py --plan pp=2
python benchmarks/snapshots.py --every 1          # after every step

A block begins with a snapshot due. Seconds of a block are those of the slowest rank; `cpu` is what both ranks computed,
which other programs on the machine disturb less.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from unisono.config import ModelConfig, Recipe, TrainConfig, resolve
from unisono.launch.nursery import Nursery
from unisono.launch.recovery import Recovery
from unisono.plan import Plan


def prepare(argument: dict[str, Any]) -> Any:
    """In the helper: the data."""
    from unisono.train.data.load import load

    recipe = Recipe.model_validate_json(argument["recipe"])
    return load(recipe.data, recipe.model)


def main(ctx: Any, argument: dict[str, Any], corpus: Any) -> dict[str, Any]:
    """In each rank: blocks without and with snapshots in turn."""
    from unisono.observe.span import Recorder
    from unisono.train.build import build, connect, feeds
    from unisono.train.session import place_of
    from unisono.train.shelf import MemoryShelf
    from unisono.train.snapshots import Snapshots, among
    from unisono.train.step import train_step

    resolved = resolve(Recipe.model_validate_json(argument["recipe"]), argument["plan"])
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, "gloo", 600.0)
    connect(place, ctx.store)
    run = build(resolved.recipe, resolved.plan, place, corpus, Recorder(ctx.rank))
    feed, _ = feeds(resolved.recipe, resolved.plan, corpus, place.device)
    agree = among(ctx.store, ctx.rank, ctx.world)
    snapshots = Snapshots(
        run, resolved.plan, MemoryShelf(ctx.shelf), argument["every"], agree,
        lambda text: ctx.channel.send("note", text=text),
    )  # fmt: skip

    def step(beside: bool) -> float:
        leaves, begun = feed.fetch(run.step, run.leaves), time.perf_counter()
        train_step(run, leaves)
        seconds = time.perf_counter() - begun
        if beside:
            snapshots.stepped(seconds, {})
        return time.perf_counter() - begun

    for _ in range(6):  # by then it is known how often
        step(True)
    blocks: dict[str, list[list[float]]] = {"without": [], "with": []}
    length, stall = max(8, snapshots.every), 0.0
    length -= length % snapshots.every
    snapshots.told()
    for block in range(2 * argument["pairs"]):
        beside = block % 2 == 1
        snapshots.settle()
        run.mesh.world.barrier()
        begun, cpu = time.perf_counter(), time.process_time()
        for _ in range(length):
            step(beside)
        snapshots.settle()
        run.mesh.world.barrier()
        seconds = (time.perf_counter() - begun) / length
        blocks["with" if beside else "without"].append([seconds, (time.process_time() - cpu) / length])
        stall += snapshots.told().get("snapshot_stall", 0.0)
    own = sum(slot.master.numel() for slot in run.local.slots if slot.counted(run.mesh.at))
    return {"parameters": own, "every": snapshots.every, "length": length, "stall_s": stall, **blocks}


def measure(plan: str, every: int | None, pairs: int) -> dict[str, Any]:
    """One row: seconds of a step in both kinds of blocks, and how much longer those with snapshots are, in percent."""
    ranks = Plan.parse(plan).world
    model = ModelConfig(n_layer=5, n_head=8, d_model=400, context=128)
    recipe = Recipe(model=model, train=TrainConfig(global_batch=8, micro_batch=2, steps=100_000))
    argument = {
        "recipe": recipe.model_dump_json(exclude_unset=True),
        "plan": plan,
        "pairs": pairs,
        "every": every,
    }
    with Nursery("snapshots:main", path=[str(Path(__file__).parent)]) as nursery:
        outcome = nursery.run(argument, ranks, 1, lambda rank, event: None, 600.0, recovery=Recovery(ranks))
    if outcome.error is not None:
        raise outcome.error
    found = [one for one in outcome.results if one is not None]

    def each(kind: str, number: int) -> list[float]:
        return [
            sum(block) if number else max(block)
            for block in zip(*([b[number] for b in one[kind]] for one in found))
        ]

    def more(number: int) -> float:
        pairs_of = zip(each("without", number), each("with", number), strict=True)
        return 100 * statistics.median(after / before - 1 for before, after in pairs_of)

    taken = sum(len(one["with"]) * one["length"] // one["every"] for one in found)
    return {
        "plan": plan,
        "parameters": sum(one["parameters"] for one in found),
        "every": found[0]["every"],
        "without_s": statistics.median(each("without", 0)),
        "with_s": statistics.median(each("with", 0)),
        "percent": more(0),
        "cpu_percent": more(1),
        "stall_s": sum(one["stall_s"] for one in found) / max(1, taken),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", default="shard=2")
    parser.add_argument("--every", type=int)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    row = measure(given.plan, given.every, given.pairs)
    if given.json:
        print(json.dumps({"schema_version": 1, "rows": [row]}))
    else:
        print(
            f"{row['plan']}, {row['parameters'] / 1e6:.1f} M parameters: a step takes {row['without_s'] * 1e3:.0f} ms,"
            f" {row['with_s'] * 1e3:.0f} ms with a snapshot every {row['every']} steps: {row['percent']:+.2f} %"
            f" (cpu {row['cpu_percent']:+.2f} %); an update waited {row['stall_s'] * 1e3:.1f} ms for a snapshot"
        )
