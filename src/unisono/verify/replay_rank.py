"""`unisono verify --replay` inside its one process."""

from pathlib import Path
from typing import Any

# For its effect: reading a checkpoint draws this in late, and once in the helper is cheaper than in the rank.
import torch.distributed.checkpoint.planner_helpers  # noqa: F401

from unisono.config import Recipe, resolve
from unisono.launch.context import RankContext
from unisono.launch.pace import margin
from unisono.plan import Plan
from unisono.train.build.build import place_of
from unisono.train.data.dataset import Corpus
from unisono.train.data.load import load
from unisono.train.state.checkpoint import load as load_checkpoint
from unisono.train.state.checkpoint.find import first_whole, list_steps
from unisono.train.state.resume import check_fits
from unisono.verify.replay import Task, replay


def prepare(argument: dict[str, Any]) -> Corpus:
    """In the helper: the data."""
    recipe = Recipe.model_validate_json(argument["recipe"])
    return load(recipe.data, recipe.model)


def main(ctx: RankContext, argument: dict[str, Any], corpus: Corpus) -> dict[str, Any]:
    """Choose the nearest whole checkpoint before the step, replay, compare."""
    resolved = resolve(Recipe.model_validate_json(argument["recipe"]), argument["alone"], 1)
    step = argument["step"]
    checkpoints = list_steps(Path(argument["run_dir"]))
    start, notes = first_whole(checkpoints[n] for n in sorted(checkpoints, reverse=True) if n < step)
    if start is not None:
        check_fits(load_checkpoint(start, []), resolved.recipe, corpus.fingerprint, start)
    after = checkpoints.get(step)
    ctx.channel.send("from", start=start.name if start is not None else "", notes=notes)
    task = Task(
        resolved,
        Plan.parse(argument["plan"]),
        step,
        start,
        after,
        {int(line["step"]): line for line in argument["recorded"]},
    )
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, margin(resolved.recipe.launch.timeout))
    result = replay(task, place, corpus)
    return {
        "from": start.name if start is not None else "initial state",
        "compared_with": after.name if after is not None else None,
        **result,
    }
