"""A rank that cuts its connections at any moment frees whatever waits there, on both sides."""

import contextlib
import random
import select
import socket
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
    drawn, stuck = random.Random(ctx.rank), 0
    for turn in range(times):
        store = dist.PrefixStore(f"turn/{turn}", ctx.store)
        pg = dist.ProcessGroupGloo(store, ctx.rank, ctx.world, timedelta(seconds=100))
        meet(store, "made", ctx.rank)
        thread = threading.Thread(target=exchange, args=(pg, 1 - ctx.rank), daemon=True)
        thread.start()
        time.sleep(drawn.uniform(0.0, 0.003) + 0.003 * ctx.rank)  # rank 1 is told a moment later
        held = parting.cut()
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


def the_users_own(ctx):
    """A cut beside a server and connections of the user's, some of them in epoll sets: what still answers."""
    pg = dist.ProcessGroupGloo(ctx.store, ctx.rank, ctx.world, timedelta(seconds=100))
    with socket.create_server(("127.0.0.1", 0)) as server, select.epoll() as watched:
        one = socket.create_connection(server.getsockname())  # after the group was made
        other, _ = server.accept()
        for sock in (server, one, other):
            watched.register(sock, select.EPOLLIN)
        made = len(parting.connections())
        held = parting.cut()
        other.sendall(b"x")
        said = one.recv(1) == b"x"
        with socket.create_connection(server.getsockname()) as late, server.accept()[0] as end:
            end.sendall(b"y")
            said = said and late.recv(1) == b"y"
    meet(ctx.store, "cut", ctx.rank)
    for sock in (*held, one, other):
        sock.close()
    return made, len(held), said, pg.size()


def waits_for_one_that_has_left(ctx):
    """Seconds until who makes a group with a rank that has died before it connected is freed."""
    begun = time.monotonic()
    if ctx.rank == 0:  # its address is known, and nobody calls there
        leave = _Leaving(ctx.store)
        with contextlib.suppress(RuntimeError):
            dist.ProcessGroupGloo(leave, 0, 2, timedelta(seconds=100))
        return leave.left
    free = threading.Timer(0.2, parting.hang_up, (2,))
    free.start()
    with contextlib.suppress(RuntimeError):
        pg = dist.ProcessGroupGloo(ctx.store, 1, 2, timedelta(seconds=100))
        pg.recv([torch.zeros(1)], 0, 0).wait()
    return time.monotonic() - begun < FREED


class _Leaving(dist.Store):
    """A store for a rank that writes down its address, and leaves while it looks for the other's."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.left = inner, False

    def set(self, key, value):
        self.inner.set(key, value)

    def wait(self, keys, timeout=timedelta(seconds=60)):
        self.left = True
        raise RuntimeError("left")

    def get(self, key):
        raise RuntimeError("left")


def test_nobody_waits_for_ever_behind_a_cut(world: World) -> None:
    assert world(cut_at_random, 2, group=False, times=25) == [0, 0]


def test_a_cut_spares_what_is_no_groups(world: World) -> None:
    assert world(the_users_own, 2, group=False) == [[1, 1, True, 2]] * 2


def test_who_makes_a_group_with_one_that_has_left_is_freed(world: World) -> None:
    assert world(waits_for_one_that_has_left, 2, group=False) == [True, True]
