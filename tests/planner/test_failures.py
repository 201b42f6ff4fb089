"""Closed forms of goodput against a seeded play of failures; Young's and Daly's intervals against the exact optimum."""

import random
from math import log1p

import pytest

from unisono_contrib.planner.studies import failures

HOUR = 3600.0


def played(work: float, save: float, mtbf: float, restart: float, segments: int, seed: int) -> float:
    """Progress over time of a job that is stopped by exponential failures, segment by segment."""
    chance = random.Random(seed)
    clock, left = 0.0, chance.expovariate(1.0 / mtbf)
    for _ in range(segments):
        todo = work + save
        while left < todo:
            clock += left
            left = chance.expovariate(1.0 / mtbf)
            todo = restart + work + save
        clock, left = clock + todo, left - todo
    return segments * work / clock


@pytest.mark.parametrize(
    ("save", "mtbf", "restart"),
    [(60.0, 3 * HOUR, 300.0), (300.0, HOUR, 600.0), (1200.0, 2 * HOUR, 1800.0), (5.0, 24 * HOUR, 60.0)],
)
def test_goodput_is_that_of_played_failures(save: float, mtbf: float, restart: float) -> None:
    work = failures.daly(save, mtbf)
    segments = int(20_000 * max(1.0, mtbf / (work + save) / 4))
    told = failures.goodput(work, save, mtbf, restart)
    assert played(work, save, mtbf, restart, segments, 7) == pytest.approx(told, rel=0.02)


def best_interval(save: float, mtbf: float) -> float:
    """The exact optimum for exponential failures: where e^((t+save)/mtbf) (1 - t/mtbf) = 1, by bisection."""
    low, high = 0.0, mtbf
    for _ in range(200):
        middle = 0.5 * (low + high)
        # In logarithms, so that no exponential overflows.
        if middle < mtbf and (middle + save) / mtbf + log1p(-middle / mtbf) > 0.0:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


@pytest.mark.parametrize("save", [1.0, 60.0, 600.0, 3000.0])
def test_the_exact_interval_is_best_and_daly_is_next_to_it(save: float) -> None:
    mtbf = 2 * HOUR
    best = best_interval(save, mtbf)
    top = failures.goodput(best, save, mtbf, 120.0)
    for factor in (0.7, 0.9, 0.99, 1.01, 1.1, 1.4):
        assert failures.goodput(best * factor, save, mtbf, 120.0) < top
    assert failures.goodput(failures.daly(save, mtbf), save, mtbf, 120.0) == pytest.approx(top, rel=1e-3)
    # Young leaves out that a checkpoint may itself be cut short, and differs where saving is slow.
    young, daly = (abs(f(save, mtbf) - best) for f in (failures.young, failures.daly))
    assert daly < young


def test_where_saving_takes_longer_than_the_job_lives() -> None:
    assert failures.daly(3 * HOUR, HOUR) == HOUR
    assert failures.goodput(HOUR, 3 * HOUR, HOUR / 1000, 60.0) == 0.0
