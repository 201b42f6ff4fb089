"""sync=canonical: one SHA-256 of the final weights under many plans, and what it costs beside sync=every_step.

python benchmarks/canonical.py            # hashes under 12 plans on 1 to 8 ranks, then the cost on dp=2 and dp=4
python benchmarks/canonical.py --hashes   # the hashes alone
"""

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from unisono.config import ModelConfig, Recipe, TrainConfig, resolve
from unisono.launch.nursery import Nursery
from unisono.recipes.demo import demo

PLANS = (
    "dp=1", "dp=2", "dp=4", "dp=8", "shard=2 zero=1", "shard=4 zero=2", "shard=8 zero=3", "pp=2", "pp=4",
    "dp=2 shard=2 zero=3", "dp=2 pp=2", "dp=2 shard=2 pp=2 zero=1",
)  # fmt: skip


def prepare(argument: dict[str, Any]) -> Any:
    """In the helper: the data."""
    from unisono.verbs.train import rank as train_rank

    return train_rank.prepare(argument)


def main(ctx: Any, argument: dict[str, Any], shared: Any) -> dict[str, Any]:
    """In each rank: train, or time alternating blocks of steps of two policies."""
    if argument.get("blocks"):
        return _timed(ctx, argument, shared)
    from unisono.train.checkpoint import read_full
    from unisono.verbs.train import rank as train_rank

    summary = train_rank.main(ctx, argument, shared)
    if ctx.rank:
        return {}
    digest = hashlib.sha256()
    for name, tensor in sorted(read_full(Path(summary["checkpoint"])).items()):
        digest.update(name.encode())
        digest.update(tensor.numpy().tobytes())
    return {"sha256": digest.hexdigest(), "loss": summary["loss"]}


def _timed(ctx: Any, argument: dict[str, Any], shared: Any) -> dict[str, Any]:
    from unisono.observe.span import Recorder
    from unisono.train.build import build, connect, feeds
    from unisono.train.session import place_of
    from unisono.train.step import train_step

    recipe = Recipe.model_validate_json(argument["recipe"])
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, "gloo", 600.0)
    connect(place, ctx.store)
    runs = []
    for policy in ("every_step", "canonical"):
        resolved = resolve(recipe, f"{argument['plan']} sync={policy}")
        run = build(resolved.recipe, resolved.plan, place, shared.corpus, Recorder(ctx.rank))
        feed, _ = feeds(resolved.recipe, resolved.plan, shared.corpus, place.device)
        runs.append((run, feed))
        train_step(run, feed.fetch(0, run.leaves))
    ratios = []
    for block in range(argument["blocks"]):
        times = {}
        for which in (0, 1) if block % 2 else (1, 0):
            run, feed = runs[which]
            run.mesh.world.barrier()
            begun = time.perf_counter()
            for _ in range(argument["steps"]):
                train_step(run, feed.fetch(run.step, run.leaves))
            times[which] = time.perf_counter() - begun
        ratios.append(times[1] / times[0])
    return {"ratios": ratios}


def hashes(steps: int) -> list[dict[str, Any]]:
    """The demo's recipe with dropout, float32, under every plan."""
    recipe, _ = demo()
    rows = []
    with (
        Nursery("canonical:main", path=[str(Path(__file__).parent)]) as nursery,
        tempfile.TemporaryDirectory() as out,
    ):
        for i, plan in enumerate(PLANS):
            changed = recipe.model_copy(
                update={
                    "model": recipe.model.model_copy(update={"dropout": 0.1, "d_model": 32, "context": 32}),
                    "train": recipe.train.model_copy(
                        update={"steps": steps, "global_batch": 16, "micro_batch": 1, "eval_every": 0}
                    ),
                }
            )
            resolved = resolve(changed, f"{plan} sync=canonical")
            folder = Path(out) / str(i)
            folder.mkdir()
            argument = {
                "recipe": resolved.recipe.model_dump_json(exclude_unset=True),
                "plan": str(resolved.plan),
                "run_dir": str(folder),
                "resume": False,
                "config_text": "",
            }
            outcome = nursery.run(argument, resolved.plan.world, 1, lambda rank, event: None, 600.0)
            if outcome.error is not None:
                raise outcome.error
            found = outcome.results[0] or {}
            rows.append({"plan": plan, "ranks": resolved.plan.world, **found})
            print(
                f"{plan:<26} {resolved.plan.world} ranks  loss {found['loss']:.6f}  {found['sha256']}",
                flush=True,
            )
    return rows


def cost(blocks: int, steps: int) -> list[dict[str, Any]]:
    """Step time of canonical over that of every_step, 10 M parameters, blocks of steps in turn in the same ranks."""
    model = ModelConfig(n_layer=5, n_head=8, d_model=400, context=128)
    rows = []
    with Nursery("canonical:main", path=[str(Path(__file__).parent)]) as nursery:
        for plan in ("dp=2", "dp=4"):
            recipe = Recipe(model=model, train=TrainConfig(global_batch=8, micro_batch=1, steps=1000))
            argument = {
                "recipe": recipe.model_dump_json(exclude_unset=True),
                "plan": plan,
                "run_dir": None,
                "resume": False,
                "blocks": blocks,
                "steps": steps,
            }
            outcome = nursery.run(argument, int(plan[-1]), 1, lambda rank, event: None, 600.0)
            if outcome.error is not None:
                raise outcome.error
            ratios = (outcome.results[0] or {})["ratios"]
            median = statistics.median(ratios)
            rows.append({"plan": plan, "ratio_vs_every_step": median, "ratios": ratios})
            print(
                f"{plan}: canonical / every_step step time, median of {blocks} blocks: {median:.3f}",
                flush=True,
            )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hashes", action="store_true", help="the hashes alone")
    parser.add_argument("--cost", action="store_true", help="the cost alone")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    result: dict[str, Any] = {"schema_version": 1}
    bad = False
    if not given.cost:
        result["hashes"] = hashes(given.steps)
        same = len({row["sha256"] for row in result["hashes"]}) == 1
        print("one hash" if same else "DIFFERENT HASHES", file=sys.stderr)
        bad = not same
    if not given.hashes:
        result["cost"] = cost(given.blocks, 3)
    if given.json:
        print(json.dumps(result))
    sys.exit(bad)
