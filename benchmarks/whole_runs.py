"""Whole runs of a recipe, as ranks of a nursery play them: ours under a plan, or DDP by hand beside it.

Both begin with the same weights and see the same samples in the same order, with the same optimiser, clipping and
learning rates. The clock runs during steps only. Held-out loss is of the same windows for both, and costs no time.
"""

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import lab
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peers import Task, by_hand, model_of
from replay import device_bytes
from torch.nn.parallel import DistributedDataParallel

from unisono.config import Recipe, resolve
from unisono.launch.context import RankContext
from unisono.observe.span import Recorder
from unisono.train.build.build import build, connect, feeds, place_of
from unisono.train.data.dataset import Corpus
from unisono.train.data.load import load
from unisono.train.step.evaluate import evaluate
from unisono.train.step.train_step import train
from unisono_contrib.measure.hooks import hook_of
from unisono_contrib.measure.turns import agreed

DDP = "DDP fp32"


@dataclass(frozen=True, slots=True)
class Contestant:
    """One run under way. step: makes one, and returns its loss. held_out: the loss on held-out windows, alike on all
    ranks. payload: bytes that this rank has counted so far; None where nobody counts."""

    step: Callable[[], float]
    held_out: Callable[[], float]
    payload: Callable[[], int | None]


@cache
def _corpus(recipe: str) -> Corpus:
    told = Recipe.model_validate_json(recipe)
    return load(told.data, told.model)


def prepare(argument: dict[str, Any]) -> Corpus:
    """The data, read once for all runs of a nursery."""
    told = Recipe.model_validate_json(argument["recipe"])
    return _corpus(Recipe(name="data", model=told.model, data=told.data).model_dump_json(exclude_unset=True))


def main(ctx: RankContext, argument: dict[str, Any], corpus: Corpus) -> dict[str, Any]:
    """Plays argument["way"] for argument["steps"] of the recipe's steps: points [steps, held-out loss], one after each
    argument["every"] steps and after the last one; seconds of each step; bytes that a rank has sent."""
    if argument.get("doors"):
        lab.enter(argument["doors"][ctx.rank])
    recipe = Recipe.model_validate_json(argument["recipe"])
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, 600.0)
    connect(place, ctx.store if ctx.world > 1 else None)
    resolved = resolve(recipe, argument["plan"], ctx.world)
    task = Task(resolved.recipe, resolved.batch.micros, place, corpus)
    way = argument["way"]
    made = _by_ddp(task, way) if way == DDP or way.startswith("torch ") else _ours(task, resolved.plan)
    played = _played(made, argument["steps"], argument.get("every", 0), ctx)
    load_now, busy = os.getloadavg()[0], time.process_time()
    return {**played, "load": load_now, "processor_s": busy}


def _played(made: Contestant, steps: int, every: int, ctx: RankContext) -> dict[str, Any]:
    took: list[float] = []
    points: list[tuple[int, float]] = []
    sent, losses = 0, []
    together = dist.is_initialized()
    for step in range(1, steps + 1):
        if together and (step == 1 or (every and (step - 1) % every == 0)):
            dist.barrier()
        before, begun = device_bytes(), time.perf_counter()
        losses.append(made.step())
        took.append(time.perf_counter() - begun)
        sent += device_bytes() - before
        ctx.channel.send("step", step=step)
        if step == steps or (every and step % every == 0):
            points.append((step, made.held_out()))
    if together:
        took = agreed(took)
    payload = made.payload()
    return {
        "points": points, "took": took, "device_bytes": float(sent), "losses": losses,
        "payload_bytes": None if payload is None else float(payload),
    }  # fmt: skip


def _ours(task: Task, plan: Any) -> Contestant:
    """What `unisono train` plays between its first and its last step."""
    recipe, recorder, beside = task.recipe, Recorder(task.place.rank), [0]
    run = build(recipe, plan, task.place, task.corpus, recorder)
    feed, val = feeds(recipe, plan, task.corpus, task.place.device)
    steps = train(run, feed, recipe.train.steps)

    def held_out() -> float:
        batches = [val.fetch(i, run.leaves) for i in range(recipe.train.eval_batches)]
        before = sum(recorder.bytes().values())
        loss, _ = evaluate(run, batches)
        beside.append(sum(recorder.bytes().values()) - before)
        return loss

    return Contestant(
        lambda: float(next(steps).loss), held_out, lambda: sum(recorder.bytes().values()) - sum(beside)
    )


def _by_ddp(task: Task, way: str) -> Contestant:
    """DistributedDataParallel around the same model, with a hook of torch's or none. Hooks get one bucket; see
    `replay.peer_way`."""
    inner = model_of(task)
    cap = None if way == DDP else 1 << 12
    model = DistributedDataParallel(inner, gradient_as_bucket_view=True, bucket_cap_mb=cap)
    if way != DDP:
        model.register_comm_hook(*hook_of(way, dist.group.WORLD))  # type: ignore[arg-type]
    step = by_hand(task, model, model, lambda last: nullcontext() if last else model.no_sync())
    plan = resolve(task.recipe, f"dp={task.place.world}", task.place.world).plan
    _, val = feeds(task.recipe, plan, task.corpus, task.place.device)
    count = task.recipe.train.global_batch // (task.recipe.train.micro_batch or 1)
    own = range(
        task.place.rank * count // task.place.world, (task.place.rank + 1) * count // task.place.world
    )

    @torch.no_grad()
    def held_out() -> float:
        total = torch.zeros(2, dtype=torch.float64)
        for i in range(task.recipe.train.eval_batches):
            for leaf in val.fetch(i, own):
                loss = F.cross_entropy(
                    inner(leaf.inputs).flatten(0, 1), leaf.targets.flatten(), reduction="sum"
                )
                total += torch.tensor([float(loss), leaf.targets.numel()], dtype=torch.float64)
        dist.all_reduce(total)
        return float(total[0] / total[1])

    return Contestant(lambda: float(step()), held_out, lambda: None)
