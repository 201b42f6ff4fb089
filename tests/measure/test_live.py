"""Bytes of tensors that are alive at a step's peak are those of the ledger; what is put away is not among them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.live import LiveBytes, live_peak
from tests.ranks import World
from tests.train.small import recipe, started
from unisono.config import ModelConfig, Recipe, resolve
from unisono.plan import Plan
from unisono.planner.alive import alive, fullest
from unisono.planner.work.transformer import transformer
from unisono.train.step.train_step import train_step

SIZES = {"n_layer": 3, "n_head": 4, "d_model": 96, "context": 64, "vocab": 256}


def told(folder: Path, **sizes: Any) -> Recipe:
    made = recipe(folder, micro_batch=None, dtype="float32")
    return made.model_copy(update={"model": ModelConfig(**{**SIZES, **sizes})})


def peak(ctx: Any, told: Recipe, plan: str) -> int:
    run, feed, _ = started(ctx, told, plan)
    train_step(run, feed.fetch(0, run.leaves))
    leaves = feed.fetch(1, run.leaves)
    return live_peak(run, lambda: train_step(run, leaves)).most


def said(told: Recipe, plan: str) -> float:
    got = resolve(told, plan)
    model = replace(transformer(got.recipe.model, 256), states=2)
    return fullest(model, got.plan, micro_batch=got.batch.micro_batch, micros=got.batch.micros)[1].total


@pytest.mark.parametrize(
    "plan",
    [
        "dp=1", "micros=4", "recompute=selective", "recompute=full", "micros=2 recompute=auto:full=1,selective=2",
        "offload=optimizer", "recompute=full offload=params:to=disk", "offload=activations:to=disk",
        "blocks=0-1:recompute=full", "micros=2 blocks=0:recompute=full;1:offload=activations",
    ],
)  # fmt: skip
def test_the_ledger_is_what_is_counted(threads: World, tmp_path: Path, plan: str) -> None:
    model = told(tmp_path)
    (most,) = threads(peak, 1, group=False, told=model, plan=plan)
    assert said(model, plan) == pytest.approx(most, rel=0.03)


@pytest.mark.parametrize(
    "plan", ["cp=2", "cp=2 cp_kind=gather", "cp=2 cp_kind=ulysses", "cp=2 tp=2", "cp=2 shard=2", "shard=2 micros=2",
             "shard=2 zero=3 blocks=0:zero=1", "tp=2 blocks=0-1:tp=1"],
)  # fmt: skip
def test_the_ledger_knows_what_context_and_shards_need(threads: World, tmp_path: Path, plan: str) -> None:
    model = told(tmp_path)
    found = threads(peak, Plan.parse(plan).world, told=model, plan=plan)
    assert said(model, plan) == pytest.approx(max(found), rel=0.03)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2 recompute=full micros=2"])
def test_the_ledger_knows_what_waits_for_its_buffer(threads: World, tmp_path: Path, plan: str) -> None:
    """Gradients move into the buffer of their bucket 256 KiB at once: of a small model all are there twice."""
    model = told(tmp_path, n_layer=2, d_model=64)
    found = threads(peak, Plan.parse(plan).world, told=model, plan=plan)
    assert said(model, plan) == pytest.approx(max(found), rel=0.03)


@pytest.mark.parametrize(
    ("plan", "sizes"),
    [
        ("dp=1", {}), ("shard=2 ep=2", {}), ("tp=2", {}), ("cp=2 ep=2", {}), ("recompute=full", {}),
        ("dp=1", {"capacity_factor": 4.0}), ("dp=1", {"n_shared_experts": 1, "moe_every": 2, "activation": "swiglu"}),
    ],
)  # fmt: skip
def test_the_ledger_knows_what_experts_need(
    threads: World, tmp_path: Path, plan: str, sizes: dict[str, Any]
) -> None:
    """Of ranks that hold different experts, as tokens happen to come to them."""
    model = told(tmp_path, kind="moe", n_experts=8, d_expert=96, **sizes)
    world = Plan.parse(plan).world
    found = threads(peak, world, group=world > 1, told=model, plan=plan)
    assert said(model, plan) == pytest.approx(sum(found) / world, rel=0.03)


def test_a_storage_that_shrinks_counts_with_what_it_has_left() -> None:
    with LiveBytes([]) as seen:
        x = torch.empty(1024)
        x.untyped_storage().resize_(0)
        torch.empty(512)
    assert seen.most == x.element_size() * 1024


def test_the_optimisers_bytes_are_gone_when_it_is_put_away(threads: World, tmp_path: Path) -> None:
    model = told(tmp_path)
    with_it, without = (
        threads(peak, 1, group=False, told=model, plan=plan)[0] for plan in ("dp=1", "offload=optimizer")
    )
    elements = transformer(model.model, 256).workload.parameters
    assert with_it - without == pytest.approx(2 * 4 * elements, rel=0.01)


def test_what_is_kept_grows_linearly_with_the_context(threads: World, tmp_path: Path) -> None:
    peaks = [
        threads(peak, 1, group=False, told=told(tmp_path, context=n), plan="dp=1")[0] for n in (32, 64, 128)
    ]
    assert peaks[2] - peaks[1] == pytest.approx(2 * (peaks[1] - peaks[0]), rel=0.02)


def test_every_mode_needs_less_than_none_on_every_row() -> None:
    model = replace(transformer(ModelConfig(**{**SIZES, "n_layer": 8}), 256), states=2)

    def total(text: str, row: int) -> float:
        return alive(model, Plan.parse(f"pp=2 {text}"), micro_batch=4, micros=4, row=row).total

    for row in (0, 1):
        for text in (
            "recompute=full",
            "recompute=selective",
            "offload=optimizer",
            "offload=params",
            "offload=activations",
        ):
            assert total(text, row) < total("", row), text


def test_views_count_once_and_what_is_gone_not_at_all() -> None:
    held = torch.zeros(1024)
    with LiveBytes([held]) as seen:
        x = held + 1
        x = x.view(32, 32).T
        for _ in range(5):
            held * 2
    assert seen.most == 3 * held.nbytes
