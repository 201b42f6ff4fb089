"""`unisono verify` inside one rank: the reference, some plans one after the other, or the search for a cause."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

# For its effect: reading a checkpoint draws this in late, and once in the helper is cheaper than in every rank.
import torch.distributed.checkpoint.planner_helpers

from unisono.config import Recipe, Resolved, TrainConfig, resolve
from unisono.launch.context import RankContext
from unisono.launch.pace import margin
from unisono.parallel.cut import boundaries
from unisono.spec.finder import contributed
from unisono.train.build.build import Place, connect, model_of, place_of
from unisono.train.data.dataset import Corpus
from unisono.train.data.load import load
from unisono.train.step.overlap import unflushed
from unisono.verify.judge import find_cause, judge_plan, judge_reference, judge_stretch
from unisono.verify.play import play_plan, play_reference
from unisono.verify.stretch import play_stretch

Around = Callable[[dict[str, Any]], AbstractContextManager[object]]


@lru_cache(maxsize=4)
def _corpus(recipe_json: str) -> Corpus:
    recipe = Recipe.model_validate_json(recipe_json)
    return load(recipe.data, recipe.model)


def prepare(argument: dict[str, Any]) -> Corpus:
    """In the fork server, before each fork: the data, read once for all ranks and all plans."""
    recipe = Recipe.model_validate_json(argument["jobs"][0]["recipe"])
    about_data = recipe.model_copy(update={"train": TrainConfig(), "plan": "dp=1"})
    corpus = _corpus(about_data.model_dump_json(exclude_unset=True))
    if recipe.model.imports or ":" not in recipe.model.kind:  # a user's own module stays in the ranks
        _warm(recipe, corpus)
    return corpus


def _warm(recipe: Recipe, corpus: Corpus) -> None:
    """Build and run the model on the meta device once: that draws in parts of torch, a second or more of work, that
    each rank would draw in anew. It computes nothing and starts no thread."""
    model = model_of(recipe, corpus)
    inputs, _ = corpus.train.fetch(np.zeros(1, dtype=np.int64))
    whole = [range(len(model.blocks)), range(0)]  # type: ignore[arg-type]
    boundaries(model, whole, torch.empty(inputs.shape, dtype=inputs.dtype, device="meta"))


def main(
    ctx: RankContext, argument: dict[str, Any], corpus: Corpus, around: Around = lambda job: nullcontext()
) -> dict[str, Any]:
    """Do the jobs in turn, each on all ranks of this call; rank 0 tells of each as it ends.

    around: entered while a plan or a reference is played; tests plant their bugs there. Comparisons and the search for
    a cause stay outside of it.
    """
    for number, job in enumerate(argument["jobs"]):
        resolved = resolve(Recipe.model_validate_json(job["recipe"]), job["plan"], ctx.world)
        timeout = margin(resolved.recipe.launch.timeout)
        place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, timeout)
        if ctx.rank == 0:
            ctx.channel.send("begun", job=job["id"])
        match argument["do"]:
            case "reference":
                result = _play_reference(job, resolved, place, corpus, around)
            case "prove":
                # Ranks live on from plan to plan: each has groups of its own, under its own keys of the store.
                connect(place, None if ctx.store is None else dist.PrefixStore(f"plan-{number}", ctx.store))
                prove = _prove_stale if unflushed(resolved.plan) else _prove
                result = prove(ctx, job, resolved, place, corpus, around)
            case _:
                result = _explain(job, resolved, place, corpus)
        if ctx.rank == 0:
            ctx.channel.send("done", job=job["id"], result=result)
    return {}


def _play_reference(
    job: dict[str, Any], resolved: Resolved, place: Place, corpus: Corpus, around: Around
) -> dict[str, Any]:
    folder = Path(job["folder"])
    with around(job):
        play_reference(resolved, place, corpus, job["steps"], folder)
        odd = {}
        if resolved.plan.arithmetic.fp8:
            odd = contributed("unisono.verify.float8").unlawful_products(resolved, place, corpus)
        if resolved.recipe.train.optimiser().observed:
            means = contributed("unisono.verify.layer_products").unlawful_means
            odd = odd or means(resolved, place, corpus, job["steps"], folder)
    if job.get("shelf"):
        contributed("unisono.verify.engines.export").export_question(resolved, corpus, job)
    result = judge_reference(resolved, corpus, job["steps"], folder)
    return result | (odd if result["first"] is None else {})


def _prove(
    ctx: RankContext, job: dict[str, Any], resolved: Resolved, place: Place, corpus: Corpus, around: Around
) -> dict[str, Any]:
    """Play and judge the steps of a plan, and the stretch behind them if they are right. The result is rank 0's."""
    folder, reference, steps = Path(job["folder"]), Path(job["reference"]), job["steps"]
    result: dict[str, Any] = {}
    with around(job):
        run = play_plan(resolved, place, corpus, steps, folder, reference)
    if ctx.rank == 0:
        for inferred in run.local.notes:
            ctx.channel.send("note", text=f"model: {inferred}")
        if job.get("shelf"):  # judging deletes what is right
            contributed("unisono.verify.engines.export").export_plan(resolved, corpus, job)
        result = judge_plan(resolved, *_one_device(job, place), corpus, steps, folder, reference)
    wrong = torch.tensor(float(result.get("first") is not None))
    right = not run.mesh.world.all_reduce(wrong).item()
    if right:
        with around(job):
            play_stretch(run, resolved, place, corpus, folder)
            run.mesh.world.barrier()
    if ctx.world > 1:
        dist.destroy_process_group()
    if right and ctx.rank == 0:
        result |= judge_stretch(resolved, *_one_device(job, place), corpus, steps, folder, reference)
    return result


def _prove_stale(
    ctx: RankContext, job: dict[str, Any], resolved: Resolved, place: Place, corpus: Corpus, around: Around
) -> dict[str, Any]:
    """Play and judge a pipeline that is not emptied between steps. The result is rank 0's."""
    stale, folder = contributed("unisono.verify.stale"), Path(job["folder"])
    steps = max(job["steps"], stale.FLOWING)
    with around(job):
        stale.play_stale(resolved, place, corpus, steps, folder)
    if ctx.world > 1:
        dist.destroy_process_group()
    if ctx.rank != 0:
        return {}
    schedule = unflushed(resolved.plan)
    return stale.judge_stale(schedule, resolved, *_one_device(job, place), corpus, steps, folder)


def _one_device(job: dict[str, Any], place: Place) -> tuple[Resolved, Place]:
    """Return the plan of the one device that a plan is held to, and its place: this rank's device."""
    return resolve(Recipe.model_validate_json(job["recipe"]), job["one"]), replace(place, rank=0, world=1)


def _explain(job: dict[str, Any], resolved: Resolved, place: Place, corpus: Corpus) -> dict[str, Any]:
    proven = resolve(Recipe.model_validate_json(job["recipe"]), job["proved"])
    folder, reference = Path(job["folder"]), Path(job["reference"])
    cause = find_cause(proven, resolved, place, corpus, folder, reference, job["step"], job["calm"])
    return {"cause": cause.name, "explanation": cause.text}
