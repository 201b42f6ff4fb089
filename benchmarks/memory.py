"""The most bytes of tensors that are alive on a rank, counted, beside the ledger; and what its process has resident.

`python benchmarks/memory.py` plays two steps of each plan of a small GPT on forked ranks, the second one counted, and
prints a table; then the same of plans with cp, and of models with experts. `--plan` (again and again) names others,
`--experts` a model with experts. live, ledger: MiB of the fullest rank. resident: MiB of the
process at the end, with Python's and torch's own; away: MiB that lie in homes (host memory or a file).
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from unisono.config import ModelConfig, Recipe, TrainConfig, resolve
from unisono.launch.fork_server import ForkServer
from unisono.plan import Plan
from unisono.planner.alive import fullest
from unisono.planner.work.transformer import transformer

PLANS = (
    "dp=1", "micros=2", "dp=2", "dp=2 micros=2", "shard=2 zero=1", "shard=2 zero=2", "shard=2 zero=3", "tp=2",
    "pp=2 micros=4", "recompute=selective", "recompute=full", "recompute=auto:full=2,selective=2",
    "micros=2 recompute=full", "pp=2 micros=4 recompute=full", "shard=2 zero=3 recompute=full",
    "offload=optimizer:to=disk", "offload=params:to=disk", "offload=activations:to=disk",
    "micros=2 offload=activations:to=disk", "offload=params:to=disk+activations",
    "recompute=full offload=optimizer:to=disk", "recompute=full offload=params:to=disk",
)  # fmt: skip
CP = ("cp=2", "cp=2 cp_kind=gather", "cp=2 cp_kind=ulysses", "cp=2 tp=2", "cp=2 shard=2", "dp=2 cp=2")
RANGES = (
    "blocks=0-1:recompute=full", "blocks=2-3:recompute=full", "blocks=0-1:offload=activations:to=disk",
    "shard=2 zero=3 blocks=0-1:zero=2", "shard=2 zero=1 blocks=1-3:zero=3", "tp=2 blocks=0-1:tp=1",
)  # fmt: skip
# Experts of a quarter of the dense width. Routers are even only in the mean: tokens come to a rank by the batch.
MOE = ("dp=1", "shard=2 ep=2", "tp=2", "tp=2 ep=2", "cp=2 ep=2", "recompute=full")
EXPERTS = {"kind": "moe", "n_experts": 8, "d_expert": 128}
ROOM = {**EXPERTS, "capacity_factor": 4.0}
SIZES = {"n_layer": 4, "n_head": 4, "d_model": 128, "context": 64}
MIB = 2.0**20


def prepare(argument: dict[str, Any]) -> Any:
    """In the helper: the data."""
    from unisono.train.data.load import load

    recipe = Recipe.model_validate_json(argument["recipe"])
    return load(recipe.data, recipe.model)


def main(ctx: Any, argument: dict[str, Any], corpus: Any) -> dict[str, Any]:
    """In each rank: a step, and one that is counted."""
    import torch
    from live import live_peak

    from unisono.comm.device import begin_peak, is_apart
    from unisono.observe.memory import rss_mib
    from unisono.observe.span import Recorder
    from unisono.train.build.build import build, connect, feeds, place_of
    from unisono.train.step.train_step import train_step

    resolved = resolve(Recipe.model_validate_json(argument["recipe"]), argument["plan"], ctx.world)
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, 60.0)
    connect(place, ctx.store)
    run = build(resolved.recipe, resolved.plan, place, corpus, Recorder(ctx.rank))
    feed, _ = feeds(resolved.recipe, resolved.plan, corpus, place.device)
    train_step(run, feed.fetch(0, run.leaves))
    leaves = feed.fetch(1, run.leaves)
    begin_peak(place.device)
    if is_apart(place.device):  # which counts by itself
        train_step(run, leaves)
        most, at, held = torch.get_device_module(place.device).max_memory_allocated(place.device), "", []
    else:
        seen = live_peak(run, lambda: train_step(run, leaves))
        most, at, held = seen.most, seen.at, seen.sizes
    resident = rss_mib()
    feed.close()
    return {
        "live": most,
        "at": at,
        "resident": resident,
        "away": run.local.store.most,
        "sizes": held,
    }


def row_of(plan: str, sizes: dict[str, Any], batch: int, backend: str = "gloo") -> dict[str, Any]:
    """One row of the table."""
    recipe = Recipe(model=ModelConfig(**sizes), train=TrainConfig(global_batch=batch, steps=1000))
    resolved = resolve(recipe, plan)
    argument = {"recipe": recipe.model_dump_json(exclude_unset=True), "plan": plan}
    with ForkServer("memory:main", path=[str(Path(__file__).parent)]) as nursery:
        outcome = nursery.run(
            argument, resolved.plan.world, 1, lambda rank, event: None, 600.0, backend=backend
        )
    if outcome.error is not None:
        raise outcome.error
    found = max((result or {} for result in outcome.results), key=lambda result: result["live"])
    model = replace(transformer(resolved.recipe.model, 256), states=recipe.train.optimiser().kept)
    sum_of = resolved.batch
    sizes_of = {"micro_batch": sum_of.micro_batch, "micros": sum_of.micros}
    _, ledger = fullest(model, resolved.plan, **sizes_of, apart=backend != "gloo")
    return {
        "plan": str(Plan.parse(plan)), "live": found["live"] / MIB, "ledger": ledger.total / MIB,
        "ratio": ledger.total / found["live"], "resident": found["resident"], "away": found["away"] / MIB,
        "at": found["at"], "sizes": found["sizes"],
    }  # fmt: skip


def table(rows_: list[tuple[str, dict[str, Any]]], batch: int, backend: str) -> list[dict[str, Any]]:
    """Every row, printed as it is known. rows_: plans, with the sizes of their models."""
    print(f"{'plan':44} {'live':>8} {'ledger':>8} {'ratio':>6} {'resident':>9} {'away':>8}")
    rows = []
    for plan, sizes in rows_:
        rows.append(row := row_of(plan, sizes, batch, backend))
        name = plan + (" (experts)" if "n_experts" in sizes else "")
        name += " (with room)" if "capacity_factor" in sizes else ""
        print(f"{name:44} {row['live']:8.2f} {row['ledger']:8.2f} {row['ratio']:6.3f} {row['resident']:9.1f}"
              f" {row['away']:8.2f}", flush=True)  # fmt: skip
    far = max(abs(row["ratio"] - 1.0) for row in rows)
    print(f"{len(rows)} plans, the ledger is at most {100 * far:.1f} % from what was counted")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plan", action="append")
    parser.add_argument("--experts", action="store_true")
    parser.add_argument(
        "--device", choices=("cpu", "sim"), default="cpu", help="sim: its own count of its memory"
    )
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--context", type=int, default=SIZES["context"])
    parser.add_argument("--width", type=int, default=SIZES["d_model"])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument(
        "--json", action="store_true", help="rows as one object a line, with the sizes at the peak"
    )
    asked = parser.parse_args()
    sizes = {**SIZES, "dropout": asked.dropout, "context": asked.context, "d_model": asked.width}
    if asked.plan:
        chosen = [(plan, {**sizes, **(EXPERTS if asked.experts else {})}) for plan in asked.plan]
    else:
        chosen = [(plan, sizes) for plan in (*PLANS, *CP, *RANGES)]
        chosen += [(plan, {**sizes, **EXPERTS}) for plan in MOE] + [("dp=1", {**sizes, **ROOM})]
    rows = table(chosen, asked.batch, {"cpu": "gloo"}.get(asked.device, asked.device))
    if asked.json:
        print("\n".join(map(json.dumps, rows)))
