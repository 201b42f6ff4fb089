"""Racing loops against each other inside the same processes: the part that every rank plays.

Two loops alternate in short blocks of steps, A B B A, so that whatever slows the machine for a while slows both.
"""

import itertools
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from axis_peers import PEERS as AXES
from peers import Racer, Task, ddp, fsdp, ours, plain

from unisono.comm.device import is_apart, properties
from unisono.config import Recipe, resolve
from unisono.launch.context import RankContext
from unisono.train.build.build import connect, place_of
from unisono.train.data.dataset import Corpus
from unisono.train.data.load import load

WARM_UP = 3  # steps of each loop before anything is timed


def prepare(argument: dict[str, Any]) -> Corpus:
    """The data, read once before the fork."""
    recipe = Recipe.model_validate_json(argument["recipe"])
    return load(recipe.data, recipe.model)


def main(ctx: RankContext, argument: dict[str, Any], corpus: Corpus) -> dict[str, Any]:
    """Race argument["peer"] against ours under argument["plan"]: what `race` returns, and what it was run on."""
    resolved = resolve(Recipe.model_validate_json(argument["recipe"]), argument["plan"], ctx.world)
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, 600.0)
    connect(place, ctx.store if ctx.world > 1 else None)
    task = Task(resolved.recipe, resolved.batch.micros, place, corpus, resolved.plan.precision == "bf16")
    with tempfile.TemporaryDirectory() as folder:
        hand = partial(by_name, argument["peer"], task)
        own = partial(ours, task, resolved.plan, argument["plan"], ctx.channel, Path(folder))
        makers = [hand if argument["control"] else own, hand]
        if argument["ours_first"]:
            mine, peer = (make() for make in makers)
        else:
            peer, mine = (make() for make in reversed(makers))
        rounds, losses = race(mine, peer, argument["seconds"], argument["block_seconds"], ctx)
        mine.close()
    names = {"ours": mine.name, "peer": peer.name, **hardware(place.device)}
    return {**names, "tokens": task.tokens, "rounds": rounds, "losses": losses}


def hardware(device: torch.device) -> dict[str, Any]:
    """What a rank computed on, and the most of its memory that PyTorch had in use."""
    if not is_apart(device):
        return {"device": "cpu"}
    peak = torch.get_device_module(device).max_memory_allocated(device) / 2**30
    return {"device": properties(device).get("name", device.type), "peak_gib": peak}


def by_name(name: str, task: Task) -> Racer:
    """A hand-written loop."""
    makers: dict[str, Callable[[Task], Racer]] = {
        "plain": plain,
        "ddp": ddp,
        "zero-1": lambda task: ddp(task, dealt=True),
        "fsdp": lambda task: fsdp(task, reshard=True),
        "fsdp-no-reshard": lambda task: fsdp(task, reshard=False),
        **AXES,
    }
    return makers[name](task)


Round = tuple[tuple[float, float], tuple[float, float]]


def race(
    mine: Racer, peer: Racer, seconds: float, block_seconds: float, ctx: RankContext
) -> tuple[list[Round], list[tuple[float, float]]]:
    """Per round, for mine and the peer, seconds a step by the clock and by this rank's processor; losses per step."""
    pair = (mine, peer)
    seen: tuple[list[float | torch.Tensor], ...] = ([], [])

    def block(who: int, steps: int) -> tuple[float, float]:
        meet()
        begun, busy = time.perf_counter(), time.process_time()
        seen[who].extend(pair[who].step() for _ in range(steps))
        meet()
        return (time.perf_counter() - begun) / steps, (time.process_time() - busy) / steps

    for who in (0, 1, 1, 0):
        slow, _ = block(who, WARM_UP)
    steps = agree(max(1, round(block_seconds / slow)))
    rounds: list[Round] = []
    end = time.perf_counter() + seconds
    for turn in itertools.count():
        order = (0, 1, 1, 0) if turn % 2 == 0 else (1, 0, 0, 1)
        took: tuple[list[tuple[float, float]], ...] = ([], [])
        for who in order:
            took[who].append(block(who, steps))
        ours_took, peer_took = ((sum(wall) / 2, sum(busy) / 2) for wall, busy in (zip(*one) for one in took))
        rounds.append((ours_took, peer_took))
        ctx.channel.send("round", count=turn + 1, ours=ours_took[0], peer=peer_took[0])
        if agree(int(time.perf_counter() > end)):
            break
    mine_all, peer_all = ([mean(loss) for loss in losses] for losses in seen)
    return rounds, list(zip(mine_all, peer_all, strict=True))


def meet() -> None:
    """Wait for this rank's device, and for the other ranks."""
    if dist.is_initialized():
        dist.barrier()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def here() -> torch.device:
    """Where collectives find their tensors."""
    return torch.device("cuda" if torch.cuda.is_initialized() else "cpu")


def agree(number: int) -> int:
    """The greatest of the ranks' numbers."""
    box = torch.tensor([number], device=here())
    if dist.is_initialized():
        dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return int(box.item())


def mean(number: float | torch.Tensor) -> float:
    """Over the ranks."""
    box = torch.tensor([float(number)], dtype=torch.float64, device=here())
    if dist.is_initialized():
        dist.all_reduce(box)
        box /= dist.get_world_size()
    return float(box.item())
