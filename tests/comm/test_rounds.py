"""Programs played by ranks: several under way at once, long ones in pieces, and in the ledger what they send."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.comm import rooted
from unisono.comm import rounds
from unisono.comm.collectives import COLLECTIVES, ProgramCollective
from unisono.comm.mesh import Mesh, Shape
from unisono.observe.span import Recorder
from unisono.spec.errors import UsageError
from unisono_contrib.comm.threads import run

PROGRAMS = [name for name in COLLECTIVES.names() if issubclass(COLLECTIVES.find(name), ProgramCollective)]


def dp_of(rank, ranks, text, recorder=None):
    collective = COLLECTIVES.read(text)
    return Mesh(
        Shape(dp=ranks), rank, recorder or Recorder(rank), timedelta(seconds=60), collective=collective
    ).dp


def drawn(rank, numel):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_several_under_way_do_not_mix_however_ranks_take_turns(name: str, seed: int | None) -> None:
    """Buckets that leave one after the other and are waited for together, in another order than they left."""

    def summed(rank):
        dp = dp_of(rank, 5, name)
        buckets = [torch.full((numel,), float(rank + numel)) for numel in (1, 7, 64)]
        pending = [dp.start_all_reduce(x) for x in buckets]
        order = [2, 0, 1] if rank % 2 else [0, 1, 2]
        for i in order:
            pending[i].wait()
            pending[i].wait()  # a second time nothing is left to do
        return [x.unique().tolist() for x in buckets]

    assert run(5, summed, seed=seed) == [[[10.0 + 5 * numel] for numel in (1, 7, 64)]] * 5


@pytest.mark.parametrize("name", PROGRAMS)
def test_long_vectors_go_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "PIECE", 64)
    monkeypatch.setattr(rounds, "_CUT", 256)

    def summed(rank):
        dp = dp_of(rank, 4, name)
        x, y = drawn(rank, 501), drawn(rank, 501)
        return dp.all_reduce(x), dp.broadcast(y, 2), dp.all_gather(drawn(rank, 33))

    whole = sum(drawn(rank, 501) for rank in range(4))
    for total, first, gathered in run(4, summed):
        torch.testing.assert_close(total, whole, rtol=1e-13, atol=1e-13)
        assert torch.equal(first, drawn(2, 501))
        assert torch.equal(gathered, torch.cat([drawn(rank, 33) for rank in range(4)]))


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_way_to_reduce(name: str) -> None:
    ways = (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT)

    def reduced(rank):
        dp = dp_of(rank, 3, name)
        return [dp.all_reduce(torch.tensor([rank + 1.0, 2.0]), way).tolist() for way in ways]

    assert run(3, reduced) == [[[3.0, 2.0], [1.0, 2.0], [2.0, 2.0], [6.0, 8.0]]] * 3


def test_what_cannot_be_reduced_pair_by_pair_is_said() -> None:
    with pytest.raises(ValueError, match="do not reduce by"):
        rounds.into(dist.ReduceOp.BXOR)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_ledger_has_what_each_rank_sends(name: str) -> None:
    def sent(rank):
        recorder = Recorder(rank)
        dp = dp_of(rank, 5, name, recorder)
        dp.all_reduce(torch.zeros(100))
        dp.broadcast(torch.zeros(100), 3)
        dp.reduce_scatter(torch.zeros(100))
        return recorder.bytes()

    member = COLLECTIVES.read(name)
    assert isinstance(member, ProgramCollective)
    programs = {op: member.program(op, 5, 3 * (op == "broadcast")) for op in
                ("all_reduce", "broadcast", "reduce_scatter")}  # fmt: skip
    for rank, counted in enumerate(run(5, sent)):
        for op, program in programs.items():
            assert counted.get(("dp", op), 0) == 4 * program.sent(rank, 100)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_scattered_sum_is_there_when_the_call_returns(name: str) -> None:
    parts = run(3, lambda rank: dp_of(rank, 3, name).reduce_scatter(drawn(rank, 12)).clone())
    whole = sum(drawn(rank, 12) for rank in range(3))
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-13, atol=1e-13)


def test_a_group_gathers_scatters_and_reduces_to_one() -> None:
    def moved(rank, name):
        dp = dp_of(rank, 3, name)
        total = rooted.reduce(dp, torch.tensor([rank + 1.0]), 1)
        parts = rooted.gather(dp, torch.tensor([[rank, rank]]), 2)
        out = rooted.scatter(dp, torch.empty(2), torch.arange(6.0) if rank == 1 else None, 1)
        return total.item() if rank == 1 else 6.0, None if parts is None else parts.tolist(), out.tolist()

    for name in ("auto", "engine", "messages", "ring", "tree"):
        first, second, third = run(3, lambda rank, name=name: moved(rank, name))
        assert first == (6.0, None, [0.0, 1.0]) and second == (6.0, None, [2.0, 3.0])
        assert third == (6.0, [[0, 0], [1, 1], [2, 2]], [4.0, 5.0])


def test_one_rank_alone_moves_nothing() -> None:
    def alone(rank):
        dp = dp_of(rank, 1, "ring")
        x = torch.ones(2)
        same = (
            dp.all_reduce(x),
            rooted.reduce(dp, x),
            rooted.gather(dp, x),
            dp.broadcast(x),
            dp.all_gather(x),
        )
        return all(y is not None and torch.equal(x, y) for y in same), rooted.scatter(
            dp, torch.empty(2), x
        ).tolist()

    assert run(1, alone) == [(True, [1.0, 1.0])]


def test_a_grid_that_does_not_fit_is_refused_in_words() -> None:
    def refused(rank):
        with pytest.raises(UsageError, match="5 ranks are no grid of 2 rows") as error:
            dp_of(rank, 5, "torus:2")
        return error.value.code

    assert run(5, refused) == ["P20"] * 5


def test_levels_are_the_hosts_that_ranks_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from unisono.comm import hosts

    seen = run(5, lambda rank: hosts.mark())
    assert len(set(seen)) == 1

    def far(rank):
        monkeypatch.setattr(hosts, "mark", lambda: dist.get_rank() // 2)
        dp = dp_of(rank, 4, "hierarchical")
        assert isinstance(dp.algorithm, rounds.ProgramAlgorithm)
        program = dp.algorithm.program("all_reduce", torch.zeros(4))
        return len(program.rounds), dp.all_reduce(torch.tensor([rank + 1.0])).item()

    assert run(4, far) == [(4, 10.0)] * 4
