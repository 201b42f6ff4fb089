"""What each rank of a proof does: a few steps, everything that they made written down, and rank 0 compares."""

import json
from dataclasses import asdict
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from unisono.config import Recipe, TrainConfig, resolve
from unisono.launch.context import RankContext
from unisono.observe.span import Recorder
from unisono.train.build import Place, build, connect, feeds
from unisono.train.checkpoint import save
from unisono.train.data import load
from unisono.train.data.dataset import Corpus
from unisono.train.state import pieces_of
from unisono.train.step import train_step
from unisono.verify.compare import compare


@lru_cache(maxsize=4)
def _corpus(recipe_json: str) -> Corpus:
    recipe = Recipe.model_validate_json(recipe_json)
    return load(recipe.data, recipe.model)


def prepare(argument: dict[str, Any]) -> Corpus:
    """In the helper, before the fork: the data, read once for all ranks and all plans."""
    recipe = Recipe.model_validate_json(argument["recipe"])
    only = recipe.model_copy(update={"train": TrainConfig(), "plan": "dp=1"})
    return _corpus(only.model_dump_json(exclude_unset=True))


def play(ctx: RankContext, argument: dict[str, Any], corpus: Corpus) -> dict[str, Any] | None:
    """Steps under `argument["plan"]`, a folder of tensors per step; with a reference, rank 0 returns the comparison."""
    resolved = resolve(Recipe.model_validate_json(argument["recipe"]), argument["plan"], ctx.world)
    recipe, plan = resolved.recipe, resolved.plan
    folder = Path(argument["folder"])
    place = Place(ctx.rank, ctx.world, torch.device("cpu"), "gloo", timedelta(seconds=recipe.launch.timeout))
    connect(place, ctx.store)
    run = build(recipe, plan, place, corpus, Recorder(ctx.rank))
    feed, _ = feeds(recipe, plan, run.mesh, corpus, place.device)
    owners = dict(run.local.stage.ties)
    losses: list[float] = []
    for step in range(argument["steps"]):
        gradients: list[Any] = []

        def inspect(kept: list[Any] = gradients) -> None:
            kept += [p for p in pieces_of(run, owners, gradients=True) if p.name.startswith("grad/")]
            kept[:] = [type(p)(p.name, p.full_shape, p.start, p.tensor.clone(), p.saved) for p in kept]

        report = train_step(run, feed.fetch(step), inspect=inspect)
        losses.append(report.loss)
        pieces = [*gradients, *pieces_of(run, owners)]
        state = {"loss": report.loss, "norm": report.norm}
        save(folder, step, pieces, state, rank=ctx.rank, world=ctx.world, token=ctx.run_token)
    if ctx.rank or not argument.get("reference"):
        return {"losses": losses}
    found = compare(Path(argument["reference"]), folder, argument["steps"], argument["bound"])
    return {"losses": losses, **json.loads(json.dumps(asdict(found)))}
