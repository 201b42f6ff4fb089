"""`unisono train` inside one rank."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

# For its effect: torch.optim draws this in with the first optimiser, which takes as long as half of torch itself. Once
# in the helper, before the fork, is cheaper than in every rank.
import torch._dynamo  # noqa: F401

from unisono.config import Recipe, resolve
from unisono.launch.context import RankContext
from unisono.train.checkpoint import verify_folder
from unisono.train.checkpoint.find import by_age
from unisono.train.data import load
from unisono.train.data.dataset import Corpus
from unisono.train.session import RankOrder, place_of, session
from unisono.verbs.train.first_look import nothing_to_resume
from unisono.verbs.train.folder import make_run_dir


@dataclass(frozen=True, slots=True)
class Shared:
    """What is found once and shared by all ranks of this host: the data, and the checkpoint to go on from."""

    corpus: Corpus
    resume: Path | None
    notes: tuple[str, ...] = ()


def prepare(argument: dict[str, Any]) -> Shared:
    """Before the fork: read the data, and look the checkpoints through for the newest that is whole."""
    recipe = Recipe.model_validate_json(argument["recipe"])
    if not argument["resume"]:
        return Shared(load(recipe.data, recipe.model), None)
    resume, notes = _newest_whole(Path(argument["run_dir"]))
    if resume is None:
        raise nothing_to_resume(argument["run_dir"], "; ".join(notes))
    return Shared(load(recipe.data, recipe.model), resume, tuple(notes))


def _newest_whole(run_dir: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint to go on from, and what is wrong with those that would have come before it."""
    notes: list[str] = []
    for folder in by_age(run_dir):
        faults = verify_folder(folder)
        if not faults:
            return folder, [f"{note}; going on from {folder.name}" for note in notes]
        notes.append(f"checkpoint {folder.name} is damaged: {faults[0]}")
    return None, notes


def main(ctx: RankContext, argument: dict[str, Any], shared: Shared) -> dict[str, Any]:
    """Train; returns the summary, with the run folder."""
    resolved = resolve(Recipe.model_validate_json(argument["recipe"]), argument["plan"], ctx.world)
    recipe, plan = resolved.recipe, resolved.plan
    run_dir = _agree_on_folder(ctx, argument, recipe)
    for note in shared.notes if ctx.rank == 0 else ():
        ctx.channel.send("note", text=note)
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, recipe.launch.timeout)
    terms = RankOrder(
        recipe, plan, run_dir, shared.resume, place, ctx.store, ctx.channel, ctx.host, ctx.run_token
    )
    resumed = shared.resume.name if shared.resume is not None else None
    return {"run_dir": str(run_dir), "resumed_from": resumed, **session(terms, shared.corpus)}


def _agree_on_folder(ctx: RankContext, argument: dict[str, Any], recipe: Recipe) -> Path:
    """The folder that whoever watches has made, or, where every rank was started by others, rank 0's.

    The latter is put into `argument`, which is then the caller's own: should this rank fail, it knows where to say so.
    """
    if argument["run_dir"]:
        return Path(argument["run_dir"])
    if ctx.rank == 0:
        made = make_run_dir(recipe, argument["config_text"])
        ctx.channel.send("folder", path=str(made))
        ctx.store.set("run_dir", str(made))
    argument["run_dir"] = ctx.store.get("run_dir").decode()
    return Path(argument["run_dir"])
