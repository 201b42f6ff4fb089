"""Messages between two ranks: what is sent arrives, is counted, and is missed by a deadline."""

from datetime import timedelta

import pytest
import torch

from unisono.comm.mesh import Mesh, Shape
from unisono.library.exchange import ScalarExchange
from unisono.library.ranks import Ranks
from unisono.observe.span import Recorder
from unisono.spec.errors import HangError, UsageError
from unisono_contrib.comm.threads import run

pytestmark = pytest.mark.timeout(120)


def ranks_of(rank, world):
    recorder = Recorder(rank)
    mesh = Mesh(Shape(dp=world), rank, recorder, timedelta(seconds=60))
    return Ranks(ScalarExchange(mesh.data, torch.device("cpu"))), recorder


def passed_round(rank, world):
    ranks, recorder = ranks_of(rank, world)
    x, out = torch.full((3,), float(rank)), torch.empty(3)
    coming = ranks.irecv(out, (rank - 1) % world, within=30)
    going = ranks.isend(x, (rank + 1) % world, within=30)
    coming.wait()
    going.wait()
    if rank == 0:
        ranks.send(out, 1)
    elif rank == 1:
        ranks.recv(out, 0)
    return [out.tolist(), recorder.bytes()["data", "send"]]


EXPECTED = [[[2.0] * 3, 24], [[2.0] * 3, 12], [[1.0] * 3, 12]]


def test_messages_arrive_and_are_counted_on_threads() -> None:
    assert run(3, lambda rank: passed_round(rank, 3)) == EXPECTED


def of_process(ctx):
    return passed_round(ctx.rank, ctx.world)


def test_messages_arrive_and_are_counted_between_processes(world) -> None:
    assert world(of_process, 3) == EXPECTED


def waits_in_vain(ctx):
    ranks, _ = ranks_of(ctx.rank, ctx.world)
    if ctx.rank:
        return ctx.store.get("over").decode()
    with pytest.raises(
        HangError, match=r"receive from rank 1: the other rank was not there within 0.2 s"
    ) as error:
        ranks.recv(torch.empty(3), 1, within=0.2)
    ctx.store.set("over", error.value.code)
    return error.value.code


def test_a_rank_that_never_sends_is_named_by_the_deadline(world) -> None:
    assert world(waits_in_vain, 2) == ["H01", "H01"]


def test_a_rank_that_is_not_there_is_refused() -> None:
    def refused(rank):
        ranks, _ = ranks_of(rank, 2)
        found = []
        for peer, x in ((rank, torch.ones(2)), (5, torch.ones(2)), (1 - rank, torch.ones(4)[::2])):
            with pytest.raises(UsageError) as error:
                ranks.isend(x, peer)
            found.append(error.value.code)
        return found

    assert run(2, refused) == [["J22"] * 3] * 2
