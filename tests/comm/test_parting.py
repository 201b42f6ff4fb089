"""A rank that cuts its connections at any moment frees whatever waits there, on both sides."""

import random
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.ranks import World
from unisono.comm import parting

pytestmark = pytest.mark.timeout(120)
FREED = 5.0
"""Seconds after which who still waits waits for ever: the group's own limit is 100."""


def cut_at_random(ctx, times):
    """How many of so many cuts left a thread of this rank waiting."""
    drawn, spared, stuck = random.Random(ctx.rank), parting.sockets(), 0
    for turn in range(times):
        store = dist.PrefixStore(f"turn/{turn}", ctx.store)
        pg = dist.ProcessGroupGloo(store, ctx.rank, ctx.world, timedelta(seconds=100))
        meet(store, "made", ctx.rank)
        thread = threading.Thread(target=exchange, args=(pg, 1 - ctx.rank), daemon=True)
        thread.start()
        time.sleep(drawn.uniform(0.0, 0.003) + 0.003 * ctx.rank)  # rank 1 is told a moment later
        held = parting.cut(spared)
        thread.join(FREED)
        stuck += thread.is_alive()
        meet(store, "over", ctx.rank)
        for sock in held:
            sock.close()
    return stuck


def meet(store, what, rank):
    store.set(f"{what}/{rank}", "")
    store.wait([f"{what}/{1 - rank}"], timedelta(seconds=60))


def exchange(pg, other):
    mine, theirs = torch.ones(3000), torch.zeros(3000)
    try:
        while True:
            coming, going = pg.recv([theirs], other, 0), pg.send([mine], other, 0)
            coming.wait()
            going.wait()
    except RuntimeError:
        return


def listens(ctx):
    """A cut with a server in this process: it still answers."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as one, server.accept()[0] as other:
            spared = {one.fileno()}
            assert parting.cut(spared) == []  # nobody closed the accepted end
            assert one.recv(1) == b"" and other.recv(1) == b""
        with socket.create_connection(server.getsockname()) as one, server.accept()[0] as other:
            other.sendall(b"x")
            return one.recv(1) == b"x"


def test_nobody_waits_for_ever_behind_a_cut(world: World) -> None:
    assert world(cut_at_random, 2, group=False, times=25) == [0, 0]


def test_a_cut_spares_what_listens_and_what_is_named(world: World) -> None:
    assert world(listens, 1, group=False) == [True]
