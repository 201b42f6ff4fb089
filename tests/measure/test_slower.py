"""A test that knows noise: equal versions are seldom called different, and a slow-down of 3 % is seen in ten pairs."""

import math
import random
from collections.abc import Callable

import pytest

from unisono_contrib.measure.history import beside, described, since
from unisono_contrib.measure.slower import ALARMS, DRIFT, MOST, SpeedDifference, of_days, of_pairs

NOISE = 0.01
"""Standard deviation of the logarithm of a repeat, and of each row beside it: that of a pair of whole repeats is 0.012."""


def versions(seed: int, slower: float, rows: int = 4) -> tuple[Callable[[], dict[str, float]], ...]:
    """An old and a new version on a machine that wanders by a third, of which both see the same, and by noise of their
    own; every twentieth repeat something else took the cores."""
    draw, drift = random.Random(seed), [0.0]

    def repeat(factor: float) -> dict[str, float]:
        drift[0] += draw.gauss(0.0, NOISE / 4)
        other = draw.expovariate(10.0) if draw.random() < 0.05 else 0.0
        whole = drift[0] + other + draw.gauss(0.0, NOISE / math.sqrt(2))
        return {f"row{i}": (i + 1) * factor * math.exp(whole + draw.gauss(0.0, NOISE)) for i in range(rows)}

    return lambda: repeat(1.0), lambda: repeat(slower)


def one(ratios: list[float]) -> SpeedDifference:
    return of_pairs({"row": ratios})["row"]


def share(slower: float, tries: int, seed: int) -> float:
    """How often the new version is called slower."""
    called = 0
    for at in range(tries):
        called += not described(beside(*versions(1000 * seed + at, slower)))["pass"]
    return called / tries


@pytest.mark.parametrize("seed", range(3))
def test_of_40_equal_pairs_of_versions_at_most_5_percent_are_called_slower(seed: int) -> None:
    assert share(1.0, 40, seed) <= 0.05


def test_a_slow_down_of_3_percent_is_seen_in_at_least_80_percent_with_ten_pairs() -> None:
    assert share(1.03, 100, seed=7) >= 0.8


def test_false_alarms_are_as_rare_as_they_claim_whatever_the_noise() -> None:
    draw = random.Random(5)
    noises = (lambda: draw.gauss(0.0, 0.3), lambda: draw.choice((-1, 1)) * draw.paretovariate(1.0))
    for noise in noises:  # also one that has no variance
        called = 0
        for _ in range(250):
            ratios: list[float] = []
            while len(ratios) < MOST and not (len(ratios) >= 5 and one(ratios).slower):
                ratios.append(math.exp(max(-50.0, min(50.0, noise()))))
            called += one(ratios).slower
        assert called / 250 <= 2.5 * ALARMS


def test_a_difference_that_is_not_worth_it_is_none() -> None:
    assert not one([1.004] * MOST).slower and one([1.03] * MOST).slower
    assert one([1 / 1.03] * MOST).faster and not one([1.5] * 4).slower


def test_two_versions_take_turns_in_beginning_and_stop_when_it_is_sure() -> None:
    order: list[str] = []
    old = lambda: (order.append("old"), {"row": 1.0})[1]
    new = lambda: (order.append("new"), {"row": 1.5})[1]
    seen = beside(old, new)
    assert order[:4] == ["old", "new", "new", "old"] and len(order) < 2 * MOST
    assert seen["all"].slower and seen["all"].ratio == pytest.approx(1.5)


def test_one_row_that_is_much_slower_is_an_alarm(seed: int = 3) -> None:
    old, equal = versions(seed, 1.0, rows=12)
    new = lambda: {name: seconds * (1.2 if name == "row3" else 1.0) for name, seconds in equal().items()}
    seen = beside(old, new)
    assert seen["row3"].slower and not seen["row4"].slower


def test_a_saved_time_has_an_interval_that_is_wider_by_the_drift() -> None:
    same = since([{"row": 1.0}] * 5, [{"row": 1.08}] * 5)
    assert not same["row"].slower and same["row"].high == pytest.approx(1.08 * (1 + DRIFT))
    assert of_days([1.2] * 5, [1.0] * 5).slower and of_days([0.8] * 5, [1.0] * 5).faster
