"""How replicas wait for each other: what a policy's price says, on durations that are drawn and on ones written out."""

from statistics import fmean

import pytest

from unisono.sync import POLICIES
from unisono_contrib.planner.stragglers import law

DRAWN = law("exponential:0.3").durations(4, 2, 64)
ONE_SLOW = [[1.0] * 12, [1.0] * 12, [1.0] * 12, [5.0] * 12]


def pace(sync: str, durations=DRAWN) -> float:
    return POLICIES.read(sync).pace(durations)


@pytest.mark.parametrize(
    "sync",
    [
        "local_sgd:h=1", "diloco:h=1", "period:1", "gossip:complete", "gossip:ring,report=1", "ssp:s=0",
        "quorum:k=4", "diloco:h=9,inside=4",
    ],
)  # fmt: skip
def test_who_meets_all_in_every_step_waits_as_in_lock_step(sync: str) -> None:
    assert pace(sync) == pytest.approx(pace("every_step"))


@pytest.mark.parametrize(
    "family", ["local_sgd:h={}", "slowmo:h={}", "adaptive:h={}", "ssp:s={}", "gossip:pairs,h={},report=1000"]
)
def test_who_meets_less_waits_less(family: str) -> None:
    paces = [pace(family.format(h)) for h in (1, 2, 4, 16)]
    assert paces == sorted(paces, reverse=True)
    assert paces[-1] < 0.9 * pace("every_step") and paces[-1] >= fmean(map(fmean, DRAWN))


def test_a_round_takes_as_long_as_its_slowest_replica() -> None:
    assert pace("local_sgd:h=2", [[1, 2, 3, 4], [4, 1, 1, 1]]) == (5 + 7) / 4


def test_on_a_ring_a_delay_goes_one_replica_further_in_each_step() -> None:
    late = [[9.0, 1.0, 1.0]] + [[1.0, 1.0, 1.0]] * 5
    # After one step 0, 1 and 5 are late; after two 2 and 4 too; after three all.
    assert [pace("gossip:ring,report=9", [row[:n] for row in late]) * n for n in (1, 2, 3)] == pytest.approx(
        [(3 * 9 + 3 * 1) / 6, (5 * 10 + 2) / 6, 11]
    )


def test_a_replica_that_is_slow_for_good_is_made_up_for_by_backup_alone() -> None:
    assert pace("every_step", ONE_SLOW) == 5
    assert pace("local_sgd:h=4", ONE_SLOW) == 5
    assert pace("quorum:k=3,patience=0", ONE_SLOW) < 2
