"""Staleness: the sequencer on a logical clock, and an oracle that does not know it."""

import pytest

from unisono_contrib.sync._servers.rules import Bounded, Quorum, Unbounded
from unisono_contrib.sync._servers.simulate import (
    play,
    random_trace,
    staleness_bounded,
    staleness_quorum,
    staleness_unbounded,
)

TRACES = [
    random_trace(replicas, 60, seed, slow, turns)
    for seed, (replicas, slow, turns) in enumerate(
        [(4, (), 1.0), (4, (5.0,), 1.0), (3, (), 5.0), (1, (), 1.0)]
    )
]


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("bound", [0, 1, 4])
def test_bounded_staleness_is_the_oracles_to_the_unit(trace, bound: int) -> None:
    got, want = play(Bounded(bound), trace, 60), staleness_bounded(trace, bound)
    assert +got.staleness == +want.staleness
    assert max(got.staleness) <= bound
    assert got.seconds == pytest.approx(want.seconds)
    assert got.steps == want.steps == 60


@pytest.mark.parametrize("trace", TRACES)
def test_unbounded_staleness_is_the_oracles_to_the_unit(trace) -> None:
    got, want = play(Unbounded(len(trace)), trace, 60), staleness_unbounded(trace)
    assert got.staleness == want.staleness
    assert got.steps == want.steps == 60 * len(trace)


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("patience", [0, 3])
def test_lateness_under_a_quorum_is_the_oracles_to_the_unit(trace, patience: int) -> None:
    for k in range(1, len(trace) + 1):
        got, want = play(Quorum(k, patience), trace, 60), staleness_quorum(trace, k, patience, 60)
        assert got.staleness == want.staleness
        assert got.seconds == pytest.approx(want.seconds)
        assert got.steps == 60


def test_a_replica_that_is_slow_for_good_is_made_up_for_by_a_quorum_and_not_by_a_bound() -> None:
    trace = random_trace(4, 200, 1, (5.0,))
    lockstep = staleness_bounded(trace, 0).seconds
    assert lockstep / play(Quorum(3, 3), trace, 200).seconds > 3.0
    assert lockstep / play(Bounded(4), trace, 200).seconds < 1.2


def test_replicas_that_are_slow_in_turn_are_made_up_for_by_a_bound() -> None:
    trace = random_trace(4, 200, 1, turns=5.0)
    assert staleness_bounded(trace, 0).seconds / play(Bounded(4), trace, 200).seconds > 2.0
