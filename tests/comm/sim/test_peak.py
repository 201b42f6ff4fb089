"""The peak of a simulated device's memory is the planner's."""

import gc
from dataclasses import replace
from typing import Any

import pytest

from tests.comm.sim.test_beside import placed
from unisono.config import ModelConfig, Recipe, TrainConfig, resolve
from unisono.planner.alive import fullest
from unisono.planner.work.transformer import transformer

pytestmark = pytest.mark.timeout(120)

RECIPE = Recipe(
    model=ModelConfig(n_layer=4, n_head=4, d_model=128, context=64, vocab=256),
    train=TrainConfig(global_batch=16, steps=10),
)
PLANS = ["dp=1", "recompute=full", "offload=optimizer", "offload=activations", "micros=2 offload=activations"]


def peaks(ctx: Any, recipe: str, plans: list[str]) -> list[int]:
    """Bytes at the peak of the second step, for each plan."""
    import torch

    from unisono.comm.device import begin_peak
    from unisono.observe.span import Recorder
    from unisono.train.build.build import build, feeds
    from unisono.train.data.load import load
    from unisono.train.step.train_step import train_step

    place, most = placed(ctx), []
    for plan in plans:
        got = resolve(Recipe.model_validate_json(recipe), plan)
        corpus = load(got.recipe.data, got.recipe.model)
        run = build(got.recipe, got.plan, place, corpus, Recorder())
        feed, _ = feeds(got.recipe, got.plan, corpus, place.device)
        train_step(run, feed.fetch(0, run.leaves))
        leaves = feed.fetch(1, run.leaves)
        begin_peak(place.device)
        train_step(run, leaves)
        feed.close()
        most.append(torch.get_device_module(place.device).max_memory_allocated(place.device))
        del run, leaves, feed
        gc.collect()
    return most


def test_the_ledger_is_within_five_percent(nursery):
    kwargs = {"recipe": RECIPE.model_dump_json(exclude_unset=True), "plans": PLANS}
    argument = {"module": __name__, "file": __file__, "function": "peaks", "group": False, "kwargs": kwargs}
    outcome = nursery.run(argument, 1, timeout=60.0, backend="sim")
    assert outcome.error is None, outcome.error.trace
    model = replace(transformer(RECIPE.model, 256), states=RECIPE.train.optimiser().kept)
    for plan, most in zip(PLANS, outcome.results[0]["value"], strict=True):
        got = resolve(RECIPE, plan)
        batch = {"micro_batch": got.batch.micro_batch, "micros": got.batch.micros}
        _, ledger = fullest(model, got.plan, **batch, apart=True)
        assert ledger.total == pytest.approx(most, rel=0.05), plan
