"""Collectives: each algorithm does what the engine does; what is asked for is what is used; what cannot be is refused."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from unisono.comm.collectives import COLLECTIVES
from unisono.comm.collectives.memory import mapping as memory
from unisono.comm.collectives.messages.live import gather
from unisono.comm.mesh import Mesh, Shape
from unisono.observe.span import Recorder
from unisono.spec.errors import UsageError
from unisono_contrib.comm.threads import run

NAMES = [name for name in COLLECTIVES.names() if COLLECTIVES.find(name).threaded]


def dp_of(rank, ranks, text, recorder=None):
    recorder = recorder or Recorder(rank)
    return Mesh(Shape(dp=ranks), rank, recorder, timedelta(seconds=60), collective=COLLECTIVES.read(text)).dp


def drawn(rank, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def every_operation(rank, ranks, text):
    dp = dp_of(rank, ranks, text)
    found = []
    for numel in (1, 7, 50_000):
        buffer = dp.buffer(numel, torch.empty(0, dtype=torch.float64)).copy_(drawn(rank, numel))
        dp.start_all_reduce(buffer).wait()
        found += [buffer, dp.all_reduce(drawn(rank, numel))]
    found += [dp.all_reduce(drawn(rank, 3), op) for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN)]
    found += [dp.all_gather(drawn(rank, 2, 3)), dp.reduce_scatter(drawn(rank, ranks * 4, 2))]
    parts, coming = dp.start_exchange(drawn(rank, ranks * 5))
    out = torch.empty(ranks * 3, dtype=torch.float64)
    gathered = dp.start_all_gather(out, drawn(rank, 3))
    coming.wait()
    gathered.wait()
    return [*found, parts, out]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_each_does_what_the_engine_does(name: str, ranks: int) -> None:
    got = run(ranks, lambda rank: every_operation(rank, ranks, name))
    engine = run(ranks, lambda rank: every_operation(rank, ranks, "engine"))
    for mine, theirs in zip(got, engine, strict=True):
        for x, y in zip(mine, theirs, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("name", NAMES)
def test_a_large_sum_is_the_same_bits_on_all(name: str) -> None:
    def summed(rank):
        dp = dp_of(rank, 3, name)
        buffer = dp.buffer(100_003, torch.empty(0)).copy_(drawn(rank, 100_003))
        dp.start_all_reduce(buffer).wait()
        return buffer

    first, *others = run(3, summed)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("engine", "Handed"), ("messages", "_TwoShot"), ("memory", "BufferSum"), ("auto", "BufferSum")],
)
def test_what_is_asked_for_is_what_sums_gradients(name: str, kind: str) -> None:
    def taken(rank):
        dp = dp_of(rank, 2, name)
        buffer = dp.buffer(100_000, torch.empty(0))
        pending = dp.start_all_reduce(buffer)
        pending.wait()
        return type(pending.pending).__name__, dp.near(buffer.device), dp.says()

    for used, near, said in run(2, taken):
        assert used == kind
        assert near == (kind == "BufferSum")
        assert said.startswith("memory" if name == "auto" else name)


def test_memory_that_not_all_see_is_refused_by_all_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_anonymous_file", lambda nbytes, token: -1)

    def refused(rank):
        with pytest.raises(UsageError) as error:
            dp_of(rank, 2, "memory")
        return error.value.code, error.value.what, error.value.fix

    for code, what, fix in run(2, refused):
        assert code == "P20"
        assert "do not see each other's memory" in what
        assert "collective=auto" in fix


def test_auto_says_that_ranks_do_not_see_each_others_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_anonymous_file", lambda nbytes, token: -1)

    def said(rank):
        dp = dp_of(rank, 2, "auto")
        dp.near(torch.device("cpu"))
        return dp.says()

    assert all("do not see each other's memory" in words for words in run(2, said))


def test_only_dp_is_asked() -> None:
    def others(rank):
        mesh = Mesh(
            Shape(dp=2, shard=2),
            rank,
            Recorder(rank),
            timedelta(seconds=60),
            collective=COLLECTIVES.read("engine"),
        )
        return mesh.dp.algorithm.member.name, mesh.shard.algorithm.member.name

    assert set(run(4, others)) == {("engine", "auto")}


def test_mpi_that_has_not_started_the_ranks_is_refused_by_all_in_words() -> None:
    def refused(rank):
        with pytest.raises(UsageError, match="collective=mpi") as error:
            dp_of(rank, 2, "mpi")
        return error.value.code, "collective=auto" in error.value.fix

    assert run(2, refused) == [("P20", True)] * 2


def test_a_ring_waits_for_all_that_it_began() -> None:
    begun: list[str] = []
    over: list[str] = []

    def message(way: str) -> SimpleNamespace:
        begun.append(way)
        return SimpleNamespace(wait=lambda: over.append(way))

    pg = SimpleNamespace(
        rank=lambda: 1,
        size=lambda: 3,
        send=lambda x, peer, tag: message(f"{len(begun)} to {peer}"),
        recv=lambda x, peer, tag: message(f"{len(begun)} from {peer}"),
    )
    gather(torch.zeros(6), torch.zeros(2), pg)  # type: ignore[arg-type]
    assert sorted(begun) == sorted(over) and len(begun) == 4
