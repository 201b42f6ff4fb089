"""`unisono bench`, inside a rank."""

import socket
from importlib import import_module
from typing import Any

import torch.distributed as dist

from unisono.launch.context import RankContext
from unisono.train.build.build import connect, place_of

_TIMEOUT = 600.0


def main(ctx: RankContext, argument: dict[str, Any], shared: object) -> dict[str, Any]:
    """`argument["live"]`: the module whose `rows` is played."""
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, _TIMEOUT)
    connect(place, ctx.store)
    names = [socket.gethostname()]
    if dist.is_initialized():
        names = [""] * ctx.world
        dist.all_gather_object(names, socket.gethostname())
    question = {**argument, "hosts": names}
    rows = import_module(argument["live"]).rows(ctx, place, question)
    return {
        "rows": rows if ctx.rank == 0 else [],
        "hosts": names,
        "backend": ctx.backend,
        "threads": ctx.threads,
    }
