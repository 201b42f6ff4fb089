"""Several hosts of several ranks: sums are those of everybody, the same bits on all, and what crosses is declared."""

import random
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.comm.made_up import as_hosts
from unisono.comm.collectives import COLLECTIVES
from unisono.comm.collectives.hierarchical import live
from unisono.comm.collectives.messages import SMALL
from unisono.comm.mesh import Mesh, Shape
from unisono.comm.rounds import ProgramAlgorithm
from unisono.observe.span import Recorder
from unisono_contrib.comm import threads as worlds

pytestmark = pytest.mark.timeout(120)
NAMES = ("auto", "hierarchical")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is large begins with little."""
    for op in ("all_reduce", "reduce_scatter"):
        monkeypatch.setitem(live.passes.__globals__["LARGE"], op, 4096)


def dp_of(rank, size, name, recorder=None):
    recorder = recorder or Recorder(rank)
    return Mesh(Shape(dp=size), rank, recorder, timedelta(seconds=60), collective=COLLECTIVES.read(name)).dp


def drawn(rank, turn, numel):
    own = torch.Generator().manual_seed(1000 * turn + rank)
    return torch.randint(-50, 50, (numel,), generator=own).float()


def total(turn, size, numel):
    return torch.stack([drawn(rank, turn, numel) for rank in range(size)]).sum(0)


def played(rank, size, name, each):
    """Faults of many operations, some of them under way at once and waited for in an order of chance."""
    dp, chance, faults, under_way = dp_of(rank, size, name), random.Random(5), [], []
    dp.near(torch.device("cpu"))
    buffers = [dp.buffer(numel, torch.empty(0)) for numel in (5, 8192, 10_007, 60_000)]
    free = list(buffers)
    for turn in range(50):
        kind = chance.choice(("buffer", "buffer", "sum", "scatter", "gather", "greatest"))
        numel = chance.choice((3, 2048, 5003))
        if kind == "buffer" and free:
            x = free.pop(chance.randrange(len(free)))
            x.copy_(drawn(rank, turn, x.numel()))
            under_way.append((turn, x, dp.start_all_reduce(x)))
        elif kind == "sum":
            if not torch.equal(dp.all_reduce(drawn(rank, turn, numel)), total(turn, size, numel)):
                faults.append(f"sum of turn {turn}")
        elif kind == "greatest":
            wanted = torch.stack([drawn(other, turn, numel) for other in range(size)]).amax(0)
            if not torch.equal(dp.all_reduce(drawn(rank, turn, numel), dist.ReduceOp.MAX), wanted):
                faults.append(f"greatest of turn {turn}")
        elif kind == "scatter":
            wanted = total(turn, size, numel * size).view(size, -1)[rank]
            if not torch.equal(dp.reduce_scatter(drawn(rank, turn, numel * size)), wanted):
                faults.append(f"scattered sum of turn {turn}")
        elif kind == "gather":
            wanted = torch.cat([drawn(other, turn, numel) for other in range(size)])
            if not torch.equal(dp.all_gather(drawn(rank, turn, numel)), wanted):
                faults.append(f"gather of turn {turn}")
        while len(under_way) > chance.randrange(4):
            number, x, pending = under_way.pop(chance.randrange(len(under_way)))
            pending.wait()
            free.append(x)
            if not torch.equal(x, total(number, size, x.numel())):
                faults.append(f"buffer of turn {number}")
    return faults


@pytest.mark.parametrize(
    ("size", "hosts"), [(4, [0, 0, 1, 1]), (6, [0, 1, 1, 0, 0, 1]), (6, [0, 1, 2, 2, 1, 0])]
)
@pytest.mark.parametrize("name", NAMES)
def test_each_operation_gives_what_it_means(few, monkeypatch: pytest.MonkeyPatch, name, size, hosts) -> None:
    as_hosts(monkeypatch, hosts)
    for seed in (None, 1, 2):
        assert worlds.run(size, lambda rank: played(rank, size, name, hosts), seed=seed) == [[]] * size


@pytest.mark.parametrize("name", NAMES)
def test_a_sum_has_the_same_bits_everywhere(few, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    as_hosts(monkeypatch, [0, 0, 1, 1])

    def summed(rank):
        dp = dp_of(rank, 4, name)
        own = torch.randn(20_011, generator=torch.Generator().manual_seed(rank))
        buffer = dp.buffer(20_011, torch.empty(0)).copy_(own)
        dp.start_all_reduce(buffer).wait()
        return buffer, dp.all_reduce(own.clone())

    first, *others = worlds.run(4, summed)
    whole = sum(
        torch.randn(20_011, generator=torch.Generator().manual_seed(rank)).double() for rank in range(4)
    )
    for mine in first:
        assert torch.allclose(mine.double(), whole, atol=1e-5)
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))


def test_parts_of_earlier_sums_cross_while_others_are_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    as_hosts(monkeypatch, [0, 0, 1, 1])

    def begun(rank):
        dp = dp_of(rank, 4, "auto")
        buffers = [dp.buffer(40_000, torch.empty(0)).fill_(1.0) for _ in range(3)]
        pending = []
        for buffer in buffers:
            pending.append(dp.start_all_reduce(buffer))
            dp.barrier()
        crossed = [one.pending.between is not None for one in pending]
        for one in pending:
            one.wait()
        return crossed[:2], [buffer.unique().tolist() for buffer in buffers]

    assert worlds.run(4, begun) == [([True, True], [[4.0]] * 3)] * 4


def test_what_is_said_and_what_is_counted(few, monkeypatch: pytest.MonkeyPatch) -> None:
    as_hosts(monkeypatch, [0, 0, 1, 1])

    def told(rank):
        recorder = Recorder(rank)
        dp = dp_of(rank, 4, "auto", recorder)
        buffer, tiny = dp.buffer(1 << 16, torch.empty(0)), dp.buffer(8, torch.empty(0))
        recorder.lap()
        dp.start_all_reduce(buffer).wait()
        large = recorder.lap().nbytes
        dp.start_all_reduce(tiny).wait()
        small = recorder.lap().nbytes
        dp.reduce_scatter(torch.ones(1 << 16))
        return (
            dp.near(buffer.device),
            dp.says(),
            sum(large.values()),
            sum(small.values()),
            sum(recorder.lap().nbytes.values()),
        )

    for near, said, large, small, scattered in worlds.run(4, told):
        assert not near, "links are slow: buckets and codecs are those for several hosts"
        assert "dp has 2 ranks on each of 2 hosts" in said and said.startswith("hierarchical")
        assert large == (1 << 18) // 2, "half of the buffer: the other half crosses from the rank beside"
        assert small == 3 * 32 <= SMALL
        assert scattered == (1 << 18) // 4, "one part of four, to the other host"


@pytest.mark.parametrize("hosts", [[0, 0, 0, 1], [0, 1, 2, 3]])
def test_hosts_of_unequal_or_single_ranks_send(monkeypatch: pytest.MonkeyPatch, hosts) -> None:
    as_hosts(monkeypatch, hosts)

    def plain(rank):
        auto, named = dp_of(rank, 4, "auto"), dp_of(rank, 4, "hierarchical")
        auto.near(torch.device("cpu"))
        pending = auto.start_all_reduce(auto.buffer(40_000, torch.empty(0)).fill_(1.0))
        pending.wait()
        return (
            type(pending.pending).__name__,
            type(named.algorithm) is ProgramAlgorithm,
            "engine" in auto.says(),
        )

    assert worlds.run(4, plain) == [("Handed", True, True)] * 4


def carried_between(ctx: Any, name: str) -> list[int]:
    """(bytes that left this process's sockets in five sums of a buffer, those declared)."""
    from tests.conformance.test_collectives import carried

    with pytest.MonkeyPatch.context() as patched:
        as_hosts(patched, [0, 0, 1, 1])
        dp = dp_of(ctx.rank, ctx.world, name)
        dp.near(torch.device("cpu"))
        buffer = dp.buffer(1 << 20, torch.empty(0))
        dp.start_all_reduce(buffer).wait()
        dp.barrier()
        before = carried()
        for _ in range(5):
            dp.start_all_reduce(buffer).wait()
        dp.barrier()
        by = dp.algorithm.pick("all_reduce", buffer, True)
        return [carried() - before, 5 * by.sends("all_reduce", buffer)]


@pytest.mark.parametrize("name", NAMES)
def test_sockets_carry_what_is_declared(world, name: str) -> None:
    for sent, declared in world(carried_between, 4, name=name):
        assert declared == 5 * (4 << 20) // 2
        assert declared <= sent <= 1.01 * declared + 30_000
