"""`unisono train` inside one rank."""

from pathlib import Path
from typing import Any

from unisono.commands.run_folder import make_run_dir
from unisono.config import Recipe, resolve
from unisono.launch.context import RankContext
from unisono.train.checkpoint import newest_whole
from unisono.train.data import load
from unisono.train.data.dataset import Corpus
from unisono.train.session import Terms, place_of, session


def prepare(argument: dict[str, Any]) -> Corpus:
    """Before the fork: the data, read once for all ranks of this host."""
    recipe = Recipe.model_validate_json(argument["recipe"])
    return load(recipe.data, recipe.model)


def main(ctx: RankContext, argument: dict[str, Any], corpus: Corpus) -> dict[str, Any]:
    """Train; returns the summary, with the run folder."""
    resolved = resolve(Recipe.model_validate_json(argument["recipe"]), argument["plan"], ctx.world)
    recipe, plan = resolved.recipe, resolved.plan
    run_dir = _agree_on_folder(ctx, argument, recipe)
    resume = newest_whole(run_dir) if argument["resume"] else None
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, recipe.launch.timeout)
    terms = Terms(recipe, plan, run_dir, resume, place, ctx.store, ctx.channel, ctx.host, ctx.run_token)
    return {"run_dir": str(run_dir), **session(terms, corpus)}


def _agree_on_folder(ctx: RankContext, argument: dict[str, Any], recipe: Recipe) -> Path:
    """The folder that whoever watches has made, or, where every rank was started by others, rank 0's."""
    if argument["run_dir"]:
        return Path(argument["run_dir"])
    if ctx.rank == 0:
        made = make_run_dir(recipe, argument["config_text"])
        ctx.store.set("run_dir", str(made))
        return made
    return Path(ctx.store.get("run_dir").decode())
