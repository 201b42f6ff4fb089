"""Every collective in every operation, for 1 to 9 ranks: equal to its definition, and the bytes and rounds of theory.

On threads of one process, and on forked processes over Gloo, whose sockets are asked what they carried.
"""

import socket
import struct
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from unisono.comm.collectives import COLLECTIVES, ProgramCollective
from unisono.comm.rounds import Playing
from unisono_contrib.comm.threads import run
from unisono_contrib.verify.conformance.collective import (
    DTYPES,
    PARTS,
    THINNED,
    Judged,
    cases,
    compared,
    judged,
    on_threads,
)

pytestmark = pytest.mark.timeout(600)
LARGE = 150_001  # elements of a part: messages of several pieces
THREADED = [name for name in COLLECTIVES.names() if COLLECTIVES.find(name).threaded]
PROGRAMS = [name for name in COLLECTIVES.names() if issubclass(COLLECTIVES.find(name), ProgramCollective)]
OWN = f"{Path(__file__).with_name('own.py')}:BothWays"


@pytest.mark.parametrize("name", THREADED)
def test_seven_ranks_on_threads(name: str) -> None:
    assert on_threads(COLLECTIVES.read(name), 7, THINNED) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [*THREADED, OWN])
def test_every_size_and_dtype_on_threads(name: str) -> None:
    for ranks in range(2, 10):
        assert on_threads(COLLECTIVES.read(name), ranks, cases(PARTS, DTYPES)) == []
    for ranks in (2, 5, 8):
        assert on_threads(COLLECTIVES.read(name), ranks, cases((LARGE,), (torch.float32,))) == []


def of_process(ctx, names, large):
    """What this rank saw of each, as plain values."""
    found = {}
    for name in names:
        pg: Any = dist.new_group(list(range(ctx.world)), use_local_synchronization=True)
        some = cases((LARGE,), (torch.float32,)) if large else cases(PARTS, DTYPES)
        seen = judged(COLLECTIVES.read(name), pg, some)
        found[name] = [[one.name, one.fault, one.bits] for one in seen]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", range(2, 10))
def test_every_size_and_dtype_on_processes_over_gloo(world, ranks: int) -> None:
    for large in (False, True) if ranks in (2, 5) else (False,):
        seen = world(of_process, ranks, names=[*THREADED, OWN], large=large, timeout=500.0)
        for name in (*THREADED, OWN):
            faults = compared([[Judged(*one) for one in rank[name]] for rank in seen])
            assert faults == [], name


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_rank_plays_the_rounds_of_its_program(
    name: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round is counted where its receives are posted; who has no move in one does not wait for it."""
    played: list[int] = []
    begin = Playing.__init__

    def counted(self, turns, *args, **more):
        played.append(len(turns))
        begin(self, turns, *args, **more)

    monkeypatch.setattr(Playing, "__init__", counted)
    member = COLLECTIVES.read(name)
    assert isinstance(member, ProgramCollective)

    def summed(rank):
        pg: Any = dist.new_group(list(range(ranks)), use_local_synchronization=True)
        member.bind(pg, "dp").all_reduce(torch.ones(720), dist.ReduceOp.SUM).wait()

    run(ranks, summed)
    rounds = member.program("all_reduce", ranks).rounds
    moving = [sum(any(rank in (m.source, m.to) for m in moves) for moves in rounds) for rank in range(ranks)]
    assert sorted(played) == sorted(moving)
    assert max(played) <= len(rounds)


_SENT = 200  # where Linux's tcp_info has the bytes that were sent, those sent again included


def carried() -> int:
    """Bytes that the sockets of this process have sent."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            with socket.socket(fileno=socket.dup(int(entry.name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
                    total += struct.unpack_from("Q", info, _SENT)[0]
        except OSError:
            continue  # it is no socket, or has been closed
    return total


def on_the_wire(ctx, name, op, numel):
    """Bytes that leave through this process's sockets in five operations, and those of the program."""
    member = COLLECTIVES.read(name)
    pg: Any = dist.new_group(list(range(ctx.world)), use_local_synchronization=True)
    algorithm = member.bind(pg, "dp")
    whole, part = torch.ones(numel), torch.ones(numel // ctx.world)
    out = torch.empty(numel)
    calls = {
        "all_reduce": (whole, lambda: algorithm.all_reduce(whole, dist.ReduceOp.SUM).wait()),
        "reduce_scatter": (whole, lambda: algorithm.reduce_scatter(part, whole)),
        "all_gather": (part, lambda: algorithm.all_gather(out, part).wait()),
        "broadcast": (whole, lambda: algorithm.broadcast(whole, 0).wait()),
    }
    x, call = calls[op]
    call()
    dist.barrier(pg)
    before = carried()
    for _ in range(5):
        call()
    dist.barrier(pg)  # what waits in a socket has not left
    sent = carried() - before
    return sent, 5 * algorithm.sends(op, x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "op"), list(product(PROGRAMS, ("all_reduce", "reduce_scatter", "all_gather")))
)
def test_sockets_carry_the_bytes_of_theory(world, name: str, op: str) -> None:
    """Gloo adds a header to each message, and a word to say that its receiver is ready."""
    for sent, declared in world(on_the_wire, 4, name=name, op=op, numel=1 << 20):
        assert declared <= sent <= 1.01 * declared + 20_000
