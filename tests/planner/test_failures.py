"""Closed forms of goodput against a seeded play of failures; Young's and Daly's intervals against the exact optimum."""

import heapq
import random
from math import log1p

import pytest

from unisono.planner.studies import failures

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


def test_shares_add_up_and_intervals_are_whole_steps() -> None:
    got = failures.fixed(save=40.0, mtbf=4 * HOUR, restart=400.0, step=13.0)
    assert got.goodput + got.saving + got.lost == pytest.approx(1.0)
    assert got.interval / 13.0 == round(got.interval / 13.0)
    assert failures.fixed(40.0, 8 * HOUR, 400.0).goodput > failures.fixed(40.0, 4 * HOUR, 400.0).goodput
    assert failures.fixed(40.0, 8 * HOUR, 400.0).goodput < failures.fixed(40.0, 8 * HOUR, 40.0).goodput


def played_elastic(n: int, mtbf: float, repair: float, pause: float, step: float, until: float) -> float:
    """Progress over time of `n` replicas that fail and come back; repairs of fixed length, to test insensitivity."""
    chance = random.Random(3)
    events = [(chance.expovariate(1.0 / mtbf), "leave") for _ in range(n)]
    heapq.heapify(events)
    alive, clock, busy, quiet = n, 0.0, 0.0, 0.0
    while clock < until:
        when, what = heapq.heappop(events)
        begin = min(when, max(clock, quiet))
        busy += (when - begin) * alive / n
        clock, quiet = when, when + pause
        if what == "leave":
            busy -= 0.5 * step * alive / n
            alive -= 1
            heapq.heappush(events, (clock + repair, "back"))
        else:
            alive += 1
            heapq.heappush(events, (clock + chance.expovariate(1.0 / mtbf), "leave"))
    return busy / clock


@pytest.mark.parametrize(
    ("n", "mtbf", "repair", "pause"), [(4, 20.0, 4.0, 0.1), (64, 400.0, 8.0, 0.05), (128, 3000.0, 24.0, 0.2)]
)
def test_elastic_goodput_is_that_of_played_failures(n: int, mtbf: float, repair: float, pause: float) -> None:
    told = failures.elastic(
        n, mtbf * HOUR, repair * HOUR, pause * HOUR, 60.0, lambda alive: alive / n
    ).goodput
    got = played_elastic(n, mtbf * HOUR, repair * HOUR, pause * HOUR, 60.0, 40_000 * mtbf / n * HOUR)
    assert got == pytest.approx(told, rel=0.02)


def test_elastic_beats_stopping_where_failures_are_many() -> None:
    n, mtbf, restart = 64, 500 * HOUR, 900.0
    stops = failures.fixed(120.0, mtbf / n, restart, 10.0).goodput
    goes_on = failures.elastic(n, mtbf, 4 * HOUR, 30.0, 10.0, lambda alive: alive / n).goodput
    assert goes_on > stops
