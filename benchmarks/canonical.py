"""sync=canonical: one SHA-256 of weights, moments, losses and validation under 12 plans, and what the policy costs.

python benchmarks/canonical.py            # hashes under 12 plans on 1 to 8 ranks, then the cost on dp=2 and dp=4
python benchmarks/canonical.py --layers   # the same for canonical:shards=4, where tp and cp cut the layers too
python benchmarks/canonical.py --hashes   # the hashes alone
python benchmarks/canonical.py --hashes --timetables   # under other timetables, recomputed and put away
"""

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unisono.config import ModelConfig, Recipe, TrainConfig, resolve
from unisono.config.write import recipe_toml
from unisono.launch.fork_server import ForkServer
from unisono.plan import Plan
from unisono.recipes.demo import demo

PLANS = (
    "dp=1", "dp=2", "dp=4", "dp=8", "shard=2 zero=1", "shard=4 zero=2", "shard=8 zero=3", "pp=2", "pp=4",
    "dp=2 shard=2 zero=3", "dp=2 pp=2", "dp=2 shard=2 pp=2 zero=1",
)  # fmt: skip
LAYERS = (
    "dp=1", "tp=2", "tp=4", "tp=2 pp=2", "dp=2 tp=2", "cp=2 tp=2", "cp=4", "shard=2 tp=2",
    "tp=2 pp=2 schedule=zb1p recompute=full",
)  # fmt: skip


TIMETABLES = (
    "dp=1", "pp=2 schedule=interleaved:v=2", "pp=2 schedule=zb1p recompute=full", "pp=4 schedule=zb2p",
    "pp=2 schedule=zbv offload=activations", "dp=2 pp=2 schedule=dualpipe", "pp=2 schedule=dualpipev offload=params",
    "pp=4 schedule=dualpipe recompute=selective", "shard=2 zero=2 pp=2 schedule=interleaved:v=2 offload=optimizer",
)  # fmt: skip


def prepare(argument: dict[str, Any]) -> Any:
    """In the helper: the data."""
    from unisono.train.data.load import load

    recipe = Recipe.model_validate_json(argument["recipe"])
    return load(recipe.data, recipe.model)


def main(ctx: Any, argument: dict[str, Any], shared: Any) -> dict[str, Any]:
    """In each rank: time alternating blocks of steps of two policies."""
    return _timed(ctx, argument, shared)


def _timed(ctx: Any, argument: dict[str, Any], shared: Any) -> dict[str, Any]:
    from unisono.observe.span import Recorder
    from unisono.train.build.build import build, connect, feeds, place_of
    from unisono.train.step.train_step import train_step

    recipe = Recipe.model_validate_json(argument["recipe"])
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, "gloo", 600.0)
    connect(place, ctx.store)
    runs = []
    for policy in ("every_step", argument["policy"]):
        resolved = resolve(recipe, f"{argument['plan']} sync={policy}")
        run = build(resolved.recipe, resolved.plan, place, shared, Recorder(ctx.rank))
        feed, _ = feeds(resolved.recipe, resolved.plan, shared, place.device)
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


def hashes(steps: int, policy: str, plans: Sequence[str]) -> list[dict[str, Any]]:
    """The demo's recipe with dropout, float32, by `unisono train` under every plan, with no setting beside the plan."""
    recipe, _ = demo()
    sizes = {"dropout": 0.1, "d_model": 32, "context": 32}
    train = {"steps": steps, "global_batch": 16, "micro_batch": 1, "eval_every": max(1, steps // 3)}
    if "shards" in policy:  # collectives in every layer of every micro-batch: fewer of these
        train |= {"micro_batch": 4}
    changed = recipe.model_copy(
        update={
            "model": recipe.model.model_copy(update=sizes),
            "train": recipe.train.model_copy(update=train),
            "out": recipe.out.model_copy(update={"report": False}),
        }
    )
    rows = []
    with tempfile.TemporaryDirectory() as out:
        file = Path(out, "canonical.toml")
        file.write_text(recipe_toml(changed, {}, []))
        for plan in plans:
            command = [
                sys.executable,
                "-m",
                "unisono",
                "train",
                str(file),
                "--plan",
                f"{plan} sync={policy}",
            ]
            ended = subprocess.run(
                [*command, "--out.dir", str(Path(out, "runs")), "--json", "--quiet"],
                stdout=subprocess.PIPE,
                check=True,
            )
            summary = json.loads(ended.stdout)
            row = {
                "plan": plan,
                "ranks": summary["ranks"],
                "loss": summary["loss"],
                "val_loss": summary["val_loss"],
            }
            rows.append({**row, "sha256": _hash(summary)})
            print(
                f"{plan:<26} {row['ranks']} ranks  loss {row['loss']:.6f}  validation {row['val_loss']:.6f}  "
                f"{rows[-1]['sha256']}",
                flush=True,
            )
    return rows


def _hash(summary: dict[str, Any]) -> str:
    """Of weights, moments, and every step's loss, norm and validation loss."""
    from unisono.train.state.checkpoint import read_full

    digest = hashlib.sha256()
    for name, tensor in sorted(read_full(Path(summary["checkpoint"])).items()):
        digest.update(name.encode())
        digest.update(tensor.numpy().tobytes())
    for line in Path(summary["run_dir"], "metrics.jsonl").read_text().splitlines():
        step = json.loads(line)
        digest.update(json.dumps([step[key] for key in ("step", "loss", "grad_norm")]).encode())
    digest.update(json.dumps(summary["val"]).encode())
    return digest.hexdigest()


def cost(blocks: int, steps: int, policy: str, plans: Sequence[str]) -> list[dict[str, Any]]:
    """Step time of the policy over that of every_step, 10 M parameters, blocks of steps in turn in the same ranks."""
    model = ModelConfig(n_layer=5, n_head=8, d_model=400, context=128)
    rows = []
    with ForkServer("canonical:main", path=[str(Path(__file__).parent)]) as nursery:
        for plan in plans:
            recipe = Recipe(model=model, train=TrainConfig(global_batch=8, micro_batch=1, steps=1000))
            argument = {
                "recipe": recipe.model_dump_json(exclude_unset=True),
                "plan": plan,
                "policy": policy,
                "run_dir": None,
                "resume": False,
                "blocks": blocks,
                "steps": steps,
            }
            outcome = nursery.run(argument, Plan.parse(plan).world, 1, lambda rank, event: None, 600.0)
            if outcome.error is not None:
                raise outcome.error
            ratios = (outcome.results[0] or {})["ratios"]
            median = statistics.median(ratios)
            rows.append({"plan": plan, "ratio_vs_every_step": median, "ratios": ratios})
            print(
                f"{plan}: {policy} / every_step step time, median of {blocks} blocks: {median:.3f}",
                flush=True,
            )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hashes", action="store_true", help="the hashes alone")
    parser.add_argument("--cost", action="store_true", help="the cost alone")
    parser.add_argument("--timetables", action="store_true", help="other timetables, recomputed and put away")
    parser.add_argument("--layers", action="store_true", help="plans that cut layers, shards=4")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    result: dict[str, Any] = {"schema_version": 1}
    bad = False
    policy, plans = ("canonical:shards=4", LAYERS) if given.layers else ("canonical", PLANS)
    plans = TIMETABLES if given.timetables else plans
    timed = ("dp=1", "tp=2") if given.layers else ("dp=2", "dp=4")
    if not given.cost:
        result["hashes"] = hashes(given.steps, policy, plans)
        same = len({row["sha256"] for row in result["hashes"]}) == 1
        print("one hash" if same else "DIFFERENT HASHES", file=sys.stderr)
        bad = not same
    if not given.hashes:
        result["cost"] = cost(given.blocks, 3, policy, timed)
    if given.json:
        print(json.dumps(result))
    sys.exit(bad)
