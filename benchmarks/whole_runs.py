"""Whole runs of a recipe, as ranks of a nursery play them: ours under a plan, or DDP by hand beside it.

Both begin with the same weights and see the same samples in the same order, with the same optimiser, clipping and
learning rates. The clock runs during steps only. Held-out loss is of the same windows for both, and costs no time.
Where replicas have weights of their own, it is that of the run's weights: the outer ones, the mean, or the servers'.
"""

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchft_diloco import TORCHFT, stepper

from unisono.config import Recipe, resolve
from unisono.launch.context import RankContext
from unisono.observe.span import Recorder
from unisono.train.build.build import build, connect, feeds, place_of
from unisono.train.data.dataset import Corpus
from unisono.train.data.load import load
from unisono.train.step.evaluate import central_weights, evaluate
from unisono.train.step.train_step import train
from unisono_contrib.lab import links
from unisono_contrib.measure.hooks import hook_of
from unisono_contrib.measure.turns import agreed

DDP = "DDP fp32"


@dataclass(frozen=True, slots=True)
class Contestant:
    """One run under way. step: makes one, and returns its loss and the steps that lie behind it. held_out: the loss on
    held-out windows, alike on all ranks. payload: bytes that this rank has counted so far; None where nobody counts.
    weights: this replica's own. says: what the policy has measured in the last step."""

    step: Callable[[], tuple[float, int]]
    held_out: Callable[[], float]
    payload: Callable[[], int | None]
    weights: Sequence[torch.Tensor]
    says: Callable[[], Mapping[str, Any]] = dict


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
    argument["every"] steps and after the last one; seconds until each; seconds and bytes of each step; bytes that a
    rank has sent."""
    if argument.get("doors"):
        lab.enter(argument["doors"][ctx.rank])
    recipe = Recipe.model_validate_json(argument["recipe"])
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, 600.0)
    if not dist.is_initialized():  # ranks on threads are connected
        connect(place, ctx.store if ctx.world > 1 else None)
    resolved = resolve(recipe, argument["plan"], ctx.world)
    task = Task(resolved.recipe, resolved.batch.micros, place, corpus)
    way = argument["way"]
    if way.startswith(TORCHFT):
        host = links.address(ctx.rank) if argument.get("doors") else "127.0.0.1"
        inner = model_of(task)
        made = _by_hand(task, inner, stepper(task, inner, host, argument["torchft"]))
    elif way == DDP or way.startswith("torch "):
        made = _by_ddp(task, way)
    else:
        made = _ours(task, resolved.plan)
    played = _played(made, argument["steps"], argument.get("every", 0), ctx)
    load_now, busy = os.getloadavg()[0], time.process_time()
    return {**played, "load": load_now, "processor_s": busy}


def _played(made: Contestant, steps: int, every: int, ctx: RankContext) -> dict[str, Any]:
    took: list[float] = []
    payload: list[int] = []
    points: list[tuple[int, float]] = []
    clock: list[float] = []
    staleness: Counter[int] = Counter()
    sent, losses, at, ran = 0, [], 0, 0.0
    together = dist.is_initialized()
    for until in [*range(every, steps, every), steps] if every else [steps]:
        if together:
            dist.barrier()
        start = time.perf_counter()
        while at < until:  # a replica that was too late may skip steps
            before, counted, begun = device_bytes(), made.payload() or 0, time.perf_counter()
            loss, at = made.step()
            losses.append(loss)
            took.append(time.perf_counter() - begun)
            sent += device_bytes() - before
            payload.append((made.payload() or 0) - counted)
            for old, count in enumerate(made.says().get("staleness_counts", ())):
                staleness[old] += count
            ctx.channel.send("step", step=at)
        ran += time.perf_counter() - start
        clock.append(ran)
        points.append((until, made.held_out()))
    if together:
        clock = agreed(clock)
        most, least = agreed([float(len(took)), -float(len(took))])
        took = agreed(took) if most == -least else took
    return {
        "points": points, "clock": clock, "took": took, "device_bytes": float(sent), "losses": losses,
        "payload_bytes": None if made.payload() is None else float(sum(payload)), "payload_steps": payload,
        "distance": _distance(made.weights) if together else 0.0,
        "staleness": [staleness[old] for old in range(max(staleness, default=-1) + 1)],
    }  # fmt: skip


def _distance(weights: Sequence[torch.Tensor]) -> float:
    """The largest difference of a weight from the first rank's."""
    mine = torch.cat([x.flatten() for x in weights])
    first = mine.clone()
    dist.broadcast(first, 0)
    return agreed([float((mine - first).abs().max())])[0]


def _ours(task: Task, plan: Any) -> Contestant:
    """What `unisono train` plays between its first and its last step."""
    recipe, recorder = task.recipe, Recorder(task.place.rank)
    run = build(recipe, plan, task.place, task.corpus, recorder)
    feed, val = feeds(recipe, plan, task.corpus, task.place.device)
    steps = train(run, feed, recipe.train.steps)

    def step() -> tuple[float, int]:
        loss = float(next(steps).loss)
        return loss, run.step

    def held_out() -> float:
        batches = [val.fetch(i, run.leaves) for i in range(recipe.train.eval_batches)]
        with central_weights(run):
            return evaluate(run, batches)[0]

    weights = [slot.master.detach() for slot in run.local.slots]
    payload = lambda: sum(recorder.bytes().values())
    return Contestant(step, held_out, payload, weights, lambda: run.sync.metrics())


def _by_ddp(task: Task, way: str) -> Contestant:
    """DistributedDataParallel around the same model, with a hook of torch's or none. Hooks get one bucket; see
    `replay.peer_way`."""
    inner = model_of(task)
    cap = None if way == DDP else 1 << 12
    model = DistributedDataParallel(inner, gradient_as_bucket_view=True, bucket_cap_mb=cap)
    if way != DDP:
        model.register_comm_hook(*hook_of(way, dist.group.WORLD))  # type: ignore[arg-type]
    step = by_hand(task, model, model, lambda last: nullcontext() if last else model.no_sync())
    return _by_hand(task, inner, step)


def _by_hand(task: Task, inner: nn.Module, step: Callable[[], Any]) -> Contestant:
    """A loop written by hand around a model, with the held-out loss of ours."""
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

    counter = itertools.count(1)
    weights = [p.detach() for p in inner.parameters()]
    return Contestant(lambda: (float(step()), next(counter)), held_out, lambda: None, weights)
