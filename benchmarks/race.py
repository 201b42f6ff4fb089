"""Racing loops against each other inside the same processes: the part that every rank plays.

Two loops alternate in short blocks of steps, A B B A, so that whatever slows the machine for a while slows both.
"""

import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peers import Racer, Task, ddp, fsdp, ours, plain

from unisono.config import Recipe, resolve
from unisono.launch.context import RankContext
from unisono.train.build import connect
from unisono.train.data import load
from unisono.train.data.dataset import Corpus
from unisono.train.session import place_of

WARM_UP = 3  # steps of each loop before anything is timed


def prepare(argument: dict[str, Any]) -> Corpus:
    """The data, read once before the fork."""
    recipe = Recipe.model_validate_json(argument["recipe"])
    return load(recipe.data, recipe.model)


def main(ctx: RankContext, argument: dict[str, Any], corpus: Corpus) -> dict[str, Any]:
    """Race argument["peer"] against ours under argument["plan"]; returns seconds a step per block, and losses."""
    resolved = resolve(Recipe.model_validate_json(argument["recipe"]), argument["plan"], ctx.world)
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, 600.0)
    connect(place, ctx.store if ctx.world > 1 else None)
    task = Task(resolved.recipe, resolved.batch.micros, place, corpus)
    with tempfile.TemporaryDirectory() as folder:
        peer = by_name(argument["peer"], task)
        mine = (
            by_name(argument["peer"], task)
            if argument["control"]
            else ours(task, resolved.plan, argument["plan"], ctx.channel, Path(folder))
        )
        rounds, losses = race(mine, peer, argument["seconds"], argument["block_seconds"], ctx)
        mine.close()
    return {"ours": mine.name, "peer": peer.name, "tokens": task.tokens, "rounds": rounds, "losses": losses}


def by_name(name: str, task: Task) -> Racer:
    """A hand-written loop."""
    makers: dict[str, Callable[[Task], Racer]] = {
        "plain": plain,
        "ddp": ddp,
        "fsdp": lambda task: fsdp(task, reshard=True),
        "fsdp-no-reshard": lambda task: fsdp(task, reshard=False),
    }
    return makers[name](task)


def race(
    mine: Racer, peer: Racer, seconds: float, block_seconds: float, ctx: RankContext
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """(seconds a step of mine, of the peer) per round, and their losses per step."""
    pair = (mine, peer)
    seen: tuple[list[float], list[float]] = ([], [])

    def block(who: int, steps: int) -> float:
        meet()
        begun = time.perf_counter()
        seen[who].extend(pair[who].step() for _ in range(steps))
        meet()
        return (time.perf_counter() - begun) / steps

    for who in (0, 1, 1, 0):
        slow = block(who, WARM_UP)
    steps = agree(max(1, round(block_seconds / slow)))
    rounds = []
    end = time.perf_counter() + seconds
    for turn in itertools.count():
        order = (0, 1, 1, 0) if turn % 2 == 0 else (1, 0, 0, 1)
        took = [0.0, 0.0]
        for who in order:
            took[who] += block(who, steps) / 2
        rounds.append((took[0], took[1]))
        ctx.channel.send("round", count=turn + 1, ours=took[0], peer=took[1])
        if agree(int(time.perf_counter() > end)):
            break
    everybody = [mean(loss) for loss in seen[1]]
    return rounds, list(zip(seen[0], everybody, strict=True))


def meet() -> None:
    """Wait for the other ranks."""
    if dist.is_initialized():
        dist.barrier()


def agree(number: int) -> int:
    """The greatest of the ranks' numbers."""
    box = torch.tensor([number])
    if dist.is_initialized():
        dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return int(box.item())


def mean(number: float) -> float:
    """Over the ranks."""
    box = torch.tensor([number], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(box)
        box /= dist.get_world_size()
    return float(box.item())
