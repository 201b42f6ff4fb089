"""Memory that members lend each other: nobody overwrites what another still reads, however far one is ahead."""

import random
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch

from unisono.comm.collectives import memory as declared
from unisono.comm.collectives.engine import Engine
from unisono.comm.collectives.memory import lending, live, mapping
from unisono.comm.mesh import Mesh, Shape
from unisono.comm.tree import tree_sum
from unisono.observe.span import Recorder
from unisono_contrib.comm import threads as worlds

pytestmark = pytest.mark.timeout(120)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
TURNS = 60


def shard_of(rank, size):
    return Mesh(Shape(shard=size), rank, Recorder(rank), timedelta(seconds=60)).shard


def drawn(rank, turn, numel, dtype):
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * turn + rank)).to(dtype)


def whole(turn, size, numel, dtype):
    return torch.cat([drawn(rank, turn, numel, dtype) for rank in range(size)])


def played(rank, size):
    """Faults of gathers and sums in an order of chance, whose results are looked at late, and loans at the end."""
    group, chance, faults, held = shard_of(rank, size), random.Random(7), [], []
    for turn in range(TURNS):
        dtype, numel = chance.choice(DTYPES), chance.choice((1, 64, 331))
        like, gathers = torch.empty(0, dtype=dtype), chance.random() < 0.6
        if gathers:
            out = group.algorithm.lend("all_gather", numel * size, like)
            part = out[numel * rank : numel * (rank + 1)].copy_(drawn(rank, turn, numel, dtype))
            pending = group.start_all_gather(out, part) if turn % 2 else group.gather_into(out, part)
            held.append((turn, out, pending, whole(turn, size, numel, dtype)))
        else:
            x = group.algorithm.lend("reduce_scatter", numel * size, like)
            x.copy_(drawn(rank, turn, numel * size, dtype))
            each = [drawn(other, turn, numel * size, dtype) for other in range(size)]
            wanted = tree_sum(each)[numel * rank : numel * (rank + 1)]
            if not torch.equal(group.reduce_scatter(x), wanted):
                faults.append(f"sum of turn {turn}")
            del x
        while len(held) > chance.randrange(4):
            number, out, pending, wanted = held.pop(0)
            if pending is not None:
                pending.wait()
            if not torch.equal(out, wanted):
                faults.append(f"gather of turn {number}")
            del out, pending
    memory = group.algorithm._memory
    return faults, len(memory._lending._loans)


def on_processes(ctx):
    with patch.object(live, "LENT", 1):
        return played(ctx.rank, ctx.world)


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_operation_gives_what_it_means_on_processes(world, ranks):
    results = world(on_processes, ranks)
    assert [faults for faults, _ in results] == [[]] * ranks
    assert len({loans for _, loans in results}) == 1, "all have lent alike"
    assert 1 < results[0][1] < TURNS / 2, "what all have let go of is lent again"


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_in_any_order_of_turns_on_threads(seed, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(live, "LENT", 1)
    assert [faults for faults, _ in worlds.run(3, lambda rank: played(rank, 3), seed=seed)] == [[]] * 3


def test_what_one_holds_on_to_is_not_lent_again():
    def kept(rank):
        group, numel = shard_of(rank, 2), declared.LENT // 4

        def gathered(value):
            out = group.algorithm.lend("all_gather", 2 * numel, torch.empty(0))
            part = out[numel * rank : numel * (rank + 1)].fill_(value)
            group.gather_into(out, part)
            return out

        first = gathered(1.0)
        mine = first if rank else first.clone()
        del first
        others = [gathered(2.0 + i).data_ptr() for i in range(6)]
        return mine.unique().tolist(), len(set(others)), mine.data_ptr() in others

    for held, places, again in worlds.run(2, kept):
        assert held == [1.0]
        assert places == 2 and not again, "two are enough for who reads at once"


def test_where_memory_ends_each_has_its_own_and_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "MOST", 1)

    def few(rank):
        group, numel, found = shard_of(rank, 2), declared.LENT // 4, []
        for turn in range(3):
            out = group.algorithm.lend("all_gather", 2 * numel, torch.empty(0))
            part = out[numel * rank : numel * (rank + 1)].copy_(drawn(rank, turn, numel, out.dtype))
            lent = group.algorithm.lends("all_gather", part)
            group.gather_into(out, part)
            found.append((lent, torch.equal(out, whole(turn, 2, numel, out.dtype)), out))
        return [one[:2] for one in found]

    assert worlds.run(2, few) == [[(True, True), (False, True), (False, True)]] * 2


def test_nothing_is_lent_where_ranks_do_not_see_each_others_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "_made", lambda nbytes, token: -1)

    def own(rank):
        group = shard_of(rank, 2)
        x = group.algorithm.lend("reduce_scatter", declared.LENT, torch.empty(0)).fill_(rank + 1.0)
        return group.algorithm.lends("reduce_scatter", x), group.reduce_scatter(x).unique().tolist()

    assert worlds.run(2, own) == [(False, [3.0])] * 2


def test_a_sum_is_the_engines_to_the_bit():
    def both(rank):
        group = shard_of(rank, 3)
        x = group.algorithm.lend("reduce_scatter", 3 * 200_001, torch.empty(0)).copy_(
            drawn(rank, 0, 3 * 200_001, torch.float32)
        )
        theirs = torch.empty(200_001)
        Engine().bind(group.pg, "shard").reduce_scatter(theirs, x.clone())
        return group.algorithm.lends("reduce_scatter", x), torch.equal(group.reduce_scatter(x), theirs)

    assert worlds.run(3, both) == [(True, True)] * 3
