"""What `offload` is said to copy is what is copied; its price and its memory follow from that."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.ranks import World
from tests.train.small import recipe, started
from unisono.comm.device import Lane
from unisono.config import ModelConfig, Recipe, resolve
from unisono.plan import Plan
from unisono.planner.clusters import cluster
from unisono.planner.pricing import closed, verdict
from unisono.planner.request import PlanRequest
from unisono.planner.stack import stack
from unisono.planner.work.offload_copies import copied
from unisono.planner.work.transformer import Transformer, transformer
from unisono.spec.errors import UsageError
from unisono.train.step.train_step import train_step

SIZES = {"n_layer": 3, "n_head": 4, "d_model": 96, "context": 64, "vocab": 256}


def told(folder: Path, **sizes: Any) -> Recipe:
    made = recipe(folder, micro_batch=None, dtype="float32")
    return made.model_copy(update={"model": ModelConfig(**{**SIZES, **sizes})})


def counted(ctx: Any, told: Recipe, plan: str, bytes_: Counter[str]) -> None:
    run, feed, _ = started(ctx, told, plan)
    train_step(run, feed.fetch(0, run.leaves))
    leaves = feed.fetch(1, run.leaves)
    bytes_.clear()
    train_step(run, leaves)


@pytest.mark.parametrize("to", ["", ":to=disk"])
@pytest.mark.parametrize(
    ("plan", "sizes"),
    [
        ("offload=optimizer{}", {}),
        ("offload=params{}", {}),
        ("offload=activations{}", {}),
        ("micros=2 recompute=full offload=params{}", {}),
        ("micros=2 offload=params{}+activations", {}),
        ("offload=params{}", {"tie_embeddings": False, "bias": False}),
        ("blocks=0-1:offload=activations{}", {}),
        ("offload=optimizer{} blocks=0:offload=params{},recompute=full;2:offload=none", {}),
        ("offload=activations{} sync=canonical:shards=4", {}),
    ],
)
def test_what_is_said_to_be_copied_is_copied(
    threads: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: str, sizes: dict[str, Any], to: str
) -> None:
    bytes_, true = Counter[str](), Lane.copy

    def copy(self: Lane, there: Tensor, source: Tensor) -> Any:
        bytes_["all"] += source.nbytes
        return true(self, there, source)

    monkeypatch.setattr(Lane, "copy", copy)
    model, text = told(tmp_path, **sizes), plan.replace("{}", to)
    threads(counted, 1, group=False, told=model, plan=text, bytes_=bytes_)
    got = resolve(model, text)
    told_ = replace(transformer(got.recipe.model, 256), states=2)
    said = copied(told_, got.plan, got.batch.micro_batch, 0).of_step(got.batch.micros)
    assert said == pytest.approx(bytes_["all"], rel=0.02)


GPT = Transformer(24, 16, 2048, 2048, 50257, 16, 8192)


def ask(plan: str, where: str = "dgx-a100:1", model: Any = GPT) -> PlanRequest:
    got = Plan.parse(f"precision=bf16 {plan}").fill(8)
    return PlanRequest(model, got, cluster(where), stack("plain"), 1, 8)


@pytest.mark.parametrize("offload", ["optimizer", "activations"])
def test_what_is_away_costs_seconds_and_leaves_room(offload: str) -> None:
    plain, away = (ask(f"shard=8 offload={one}") for one in ("none", offload))
    price, other = closed(plain), closed(away)
    home = other.comm["home"]
    assert other.step == pytest.approx(price.step + home.exposed) and home.bytes > 0
    assert verdict(away).memory.total < verdict(plain).memory.total


def test_weights_that_are_away_leave_room() -> None:
    away = verdict(ask("dp=8 offload=params")).memory
    assert away.params == 0.0 and away.total < verdict(ask("dp=8")).memory.total


def test_a_disk_whose_rate_nobody_has_said_has_no_price() -> None:
    with pytest.raises(UsageError, match="nobody has said") as caught:
        closed(ask("shard=8 offload=optimizer:to=disk"))
    assert caught.value.code == "C22" and "loader.bandwidth" in str(caught.value.fix)
    where = cluster("dgx-a100:1")
    fast = replace(where, loader=replace(where.loader, bandwidth=20e9))
    said = replace(ask("shard=8 offload=optimizer:to=disk"), cluster=fast)
    assert closed(said).comm["home"].exposed > closed(ask("shard=8 offload=optimizer")).comm["home"].exposed
