"""`unisono verify` inside one rank."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from unisono.config import Recipe, TrainConfig, resolve
from unisono.launch.context import RankContext
from unisono.train.data import load
from unisono.train.data.dataset import Corpus
from unisono.train.session import place_of
from unisono.verify.play import play


@lru_cache(maxsize=4)
def _corpus(recipe_json: str) -> Corpus:
    recipe = Recipe.model_validate_json(recipe_json)
    return load(recipe.data, recipe.model)


def prepare(argument: dict[str, Any]) -> Corpus:
    """In the helper, before each fork: the data, read once for all ranks and all plans."""
    recipe = Recipe.model_validate_json(argument["recipe"])
    about_data = recipe.model_copy(update={"train": TrainConfig(), "plan": "dp=1"})
    return _corpus(about_data.model_dump_json(exclude_unset=True))


def main(ctx: RankContext, argument: dict[str, Any], corpus: Corpus) -> dict[str, Any]:
    """Play some steps of one plan; rank 0 compares with the reference if there is one."""
    resolved = resolve(Recipe.model_validate_json(argument["recipe"]), argument["plan"], ctx.world)
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, resolved.recipe.launch.timeout)
    return play(
        resolved,
        place,
        ctx.store,
        corpus,
        steps=argument["steps"],
        folder=Path(argument["folder"]),
        reference=Path(argument["reference"]) if argument["reference"] else None,
        bound=argument["bound"],
        token=ctx.run_token,
    )
