"""A small run on one rank, for tests that play a few steps of it."""

from pathlib import Path
from typing import Any

from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig, resolve
from unisono.launch.context import RankContext
from unisono.observe.span import Recorder
from unisono.train.build.build import build, feeds, place_of
from unisono.train.data.feed import Feed
from unisono.train.data.load import load
from unisono.train.step.run import Run

TEXT = "to be or not to be, that is the question. " * 60


def recipe(folder: Path, **train: Any) -> Recipe:
    """A GPT of two blocks in float64 over a text in `folder`; four micro-batches in a step, two for each of two ranks."""
    (folder / "text.txt").write_text(TEXT)
    given = {"steps": 4, "global_batch": 8, "micro_batch": 2, "lr": 1e-2, "dtype": "float64", **train}
    return Recipe(
        seed=3,
        model=ModelConfig(n_layer=2, n_head=2, d_model=16, context=8, dropout=0.1),
        data=DataConfig(source=f"text:{folder / 'text.txt'}"),
        train=TrainConfig(**given),
    )


def started(ctx: RankContext, told: Recipe, plan: str) -> tuple[Run, Feed, Feed]:
    """The run, its batches, and those of validation. Every rank calls it, or it hangs."""
    resolved = resolve(told, plan, ctx.world)
    corpus = load(resolved.recipe.data, resolved.recipe.model)
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, 60.0)
    run = build(resolved.recipe, resolved.plan, place, corpus, Recorder(ctx.rank))
    return run, *feeds(resolved.recipe, resolved.plan, corpus, place.device, kept=run.update.keeps)
