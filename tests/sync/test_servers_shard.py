"""Shards of parameters, and bytes on the wire: no ranks, no sockets."""

import math

import pytest
import torch
from torch import nn

from unisono_contrib.sync._servers.rules import Bounded, Quorum, Unbounded
from unisono_contrib.sync._servers.sequencer import Sequencer, UpdateSchedule
from unisono_contrib.sync._servers.shard import Shard, shares
from unisono_contrib.sync._servers.wire import packed, unpacked


def shard_of(
    weight: torch.Tensor, workers: int, lr: float = 0.1, dc: float = 0.0, rows: bool = False
) -> Shard:
    p = nn.Parameter(weight.clone())
    shard = Shard(
        {"w": p}, torch.optim.SGD([p], lr=lr), set(range(workers)), dc, frozenset({"w"} if rows else ())
    )
    shard.fill([weight], [])
    return shard


def rows_of(rows: list[int], values: torch.Tensor, of: int) -> torch.Tensor:
    shape = (of, values.shape[1])
    return torch.sparse_coo_tensor(
        torch.tensor([rows]), values, shape, is_coalesced=True, check_invariants=False
    )


def update(shard: Shard, version: int, workers: list[int], lr: float = 0.1) -> None:
    for worker in workers:
        shard.carry_out({"op": "took", "worker": worker, "step": version, "for": version, "late": False})
    entry = {"op": "update", "version": version, "workers": workers, "void": [], "divisor": 1.0, "lr": lr}
    shard.carry_out(entry)


def test_delay_compensation_is_the_formula_and_nothing_where_weights_have_not_moved() -> None:
    start, g0, g1 = torch.randn(4, 3), torch.randn(4, 3), torch.randn(4, 3)
    for dc in (0.0, 0.3):
        shard = shard_of(start, 2, dc=dc)
        for worker in (0, 1):
            shard.carry_out({"op": "read", "worker": worker, "version": 0})
            shard.push(worker, worker, [(g0, g1)[worker].clone()])
        update(shard, 0, [0])
        after = start - 0.1 * g0
        torch.testing.assert_close(shard.params["w"].data, after)
        update(shard, 1, [1])
        torch.testing.assert_close(
            shard.params["w"].data, after - 0.1 * (g1 + dc * g1 * g1 * (after - start))
        )


def test_a_replica_gets_the_rows_that_changed_since_it_read() -> None:
    shard = shard_of(torch.zeros(100, 4), 2, rows=True)
    read = {"op": "read", "worker": 0, "version": 0}
    assert not shard.carry_out(read)[0].tensors[0].is_sparse
    grad = rows_of([3, 70], torch.ones(2, 4), 100)
    shard.push(1, 0, [grad])
    update(shard, 0, [1])
    (news,) = shard.carry_out({**read, "version": 1})[0].tensors
    assert news.indices()[0].tolist() == [3, 70]
    assert len(packed({}, [news])) < 200
    torch.testing.assert_close(news.values(), torch.full((2, 4), -0.1))
    assert not shard.carry_out({**read, "version": 1})[0].tensors[0]._nnz()


def test_messages_come_out_as_they_went_in() -> None:
    sparse = rows_of([1, 4], torch.randn(2, 3), 6)
    sent = [
        torch.randn(3, 5).bfloat16(),
        None,
        sparse,
        torch.zeros(0, 2),
        torch.tensor(7.0, dtype=torch.float64),
    ]
    said, got = unpacked(packed({"op": "push", "step": 3}, sent))
    assert said == {"op": "push", "step": 3}
    for a, b in zip(sent, got, strict=True):
        if a is None or b is None:
            assert a is b
        else:
            assert a.is_sparse == b.is_sparse
            assert torch.equal(a.to_dense(), b.to_dense())
    for bad in (b"", b"12345678", packed({})[:-1] + b"!", packed({}, sent)[:-9]):
        with pytest.raises(ValueError):
            unpacked(bad)


def test_shares_have_about_as_many_bytes() -> None:
    parts = shares({"a": 100, "b": 60, "c": 50, "d": 40, "e": 10}, 2)
    assert parts == [["a", "d"], ["b", "c", "e"]]  # 140 and 120 of 260


def run(rule, workers: int, max_norm: float = 0.0) -> Sequencer:
    sequencer = Sequencer(rule, UpdateSchedule(lambda step: 1.0, max_norm, 100), range(workers), 1)
    sequencer.filled(0)
    for worker in range(workers):
        sequencer.begin(worker, 0)
    for worker in range(workers):
        sequencer.ready(worker, 0)
    return sequencer


def push(sequencer: Sequencer, worker: int, step: int, norm: float = 1.0) -> list[dict]:
    return [*sequencer.have(0, worker, step), *sequencer.announce(worker, step, norm)]


def ops(entries: list[dict]) -> list[str]:
    return [entry["op"] for entry in entries]


def test_a_gradient_that_is_not_of_numbers_is_refused_and_spoils_nothing() -> None:
    sequencer = run(Bounded(0), 2)
    push(sequencer, 0, 0, math.nan)
    *_, made = push(sequencer, 1, 0)
    assert (made["workers"], made["void"]) == ([1], [0])
    assert sequencer.tally.refused == 1
    sequencer = run(Unbounded(2), 2)
    assert push(sequencer, 0, 0, math.inf)[-1]["workers"] == []
    assert sequencer.version == 1


def test_a_mean_whose_norm_is_too_large_is_clipped_by_all_shards_alike() -> None:
    sequencer = Sequencer(Bounded(0), UpdateSchedule(lambda step: 1.0, 2.0, 9), range(2), 2)
    for each in (0, 1):
        sequencer.filled(each)
        sequencer.begin(each, 0)
    for each in (0, 1):
        sequencer.ready(each, 0)
    entries: list[dict] = []
    for worker in (0, 1):
        for shard in (0, 1):
            sequencer.have(shard, worker, 0)
        entries = sequencer.announce(worker, 0, 5.0)
    assert ops(entries) == ["took", "combine"]
    assert sequencer.square(0, entries[-1]["attempt"], 9.0) == []
    (made,) = sequencer.square(1, entries[-1]["attempt"], 16.0)
    assert made["divisor"] == pytest.approx(5.0 / 2.0, rel=1e-6)


@pytest.mark.parametrize("rule", [Bounded(0), Quorum(2, 0)])
def test_nobody_waits_for_a_replica_that_has_gone(rule) -> None:
    sequencer = run(rule, 3)
    push(sequencer, 0, 0)
    if isinstance(rule, Bounded):
        push(sequencer, 1, 0)
        assert sequencer.version == 0
        assert ops(sequencer.leave(2))[:2] == ["gone", "update"]
    else:
        sequencer.leave(2)
        push(sequencer, 1, 0)
    assert sequencer.version == 1
    for worker in (0, 1):
        assert ops(sequencer.ready(worker, 1)) == ["read"]
        push(sequencer, worker, 1)
    assert sequencer.version == 2


def test_a_replica_that_goes_in_the_middle_of_a_sum_is_left_out_of_it() -> None:
    sequencer = run(Quorum(2, 0), 3, max_norm=1.0)
    push(sequencer, 0, 0)
    first = push(sequencer, 1, 0)[-1]
    assert first["op"] == "combine"
    assert ops(sequencer.leave(1)) == ["gone"]
    second = push(sequencer, 2, 0)[-1]
    assert (second["op"], second["workers"]) == ("combine", [0, 2])
    assert sequencer.square(0, first["attempt"], 1.0) == []
    assert ops(sequencer.square(0, second["attempt"], 1.0)) == ["update"]


def test_a_replica_that_comes_begins_where_the_slowest_is() -> None:
    sequencer = run(Bounded(1), 2)
    for step in (0, 1):
        for worker in (0, 1):
            push(sequencer, worker, step)
            sequencer.ready(worker, step + 1)
    (begun,) = sequencer.admit(2)
    assert begun == {"op": "begun", "step": 2, "worker": 2}
    assert ops(sequencer.ready(2, 2)) == ["read"]
    push(sequencer, 0, 2)
    push(sequencer, 1, 2)
    assert sequencer.version == 2
    push(sequencer, 2, 2)
    assert sequencer.version == 3


def test_an_aware_rate_is_divided_by_a_staleness_above_one() -> None:
    rule = Unbounded(4, aware=True)
    assert [rule.rate(staleness) for staleness in (0, 1, 2, 5)] == [1.0, 1.0, 0.5, 0.2]
    sequencer = run(rule, 4)
    assert [push(sequencer, worker, 0)[-1]["lr"] for worker in range(4)] == [
        1.0,
        1.0,
        0.5,
        pytest.approx(1 / 3),
    ]


def test_a_slow_replica_is_waited_for_after_it_was_late_several_times() -> None:
    sequencer = run(Quorum(1, 1), 2)
    push(sequencer, 0, 0)
    sequencer.ready(0, 1)
    took = push(sequencer, 1, 0)[0]
    assert (took["late"], took["next"]) == (True, 1)
    sequencer.ready(1, 1)
    assert ops(push(sequencer, 0, 1)) == ["took"]
    assert ops(push(sequencer, 1, 1)) == ["took", "update"]


def test_a_gradient_of_a_later_step_does_not_take_the_place_of_one_that_was_taken() -> None:
    """Under `async` an update's number may be that of a step to come, whose gradient a shard that lags has already."""
    p = nn.Parameter(torch.zeros(2))
    shard = Shard({"w": p}, torch.optim.SGD([p], lr=1.0), {0, 1})
    shard.fill([torch.zeros(2)], [])
    shard.push(1, 0, [torch.ones(2)])
    shard.push(1, 1, [torch.full((2,), 10.0)])
    shard.carry_out({"op": "took", "worker": 1, "step": 0, "for": 1, "late": False})
    shard.carry_out({"op": "update", "version": 1, "workers": [1], "void": [], "divisor": 1.0, "lr": 1.0})
    shard.carry_out({"op": "took", "worker": 1, "step": 1, "for": 2, "late": False})
    assert torch.equal(p.detach(), torch.full((2,), -1.0))
