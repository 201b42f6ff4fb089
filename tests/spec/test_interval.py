"""How often to save: the published formulas, against the exact cost that they approximate."""

from math import sqrt

import pytest

from unisono.spec.interval import between_failures, daly, goodput, steps_between, young

HOUR = 3600.0


def test_young_is_the_root_of_twice_save_times_mtbf() -> None:
    assert young(2.0, 100.0) == 20.0
    assert young(8.0, 100.0) == 2 * young(2.0, 100.0)  # four times the save, twice the interval


@pytest.mark.parametrize("save", [0.1, 10.0, 300.0, 1200.0])
@pytest.mark.parametrize("mtbf", [HOUR, 24 * HOUR])
def test_daly_is_next_to_the_best_interval_and_nearer_than_young(save: float, mtbf: float) -> None:
    grid = [young(save, mtbf) * (0.2 + 0.0005 * i) for i in range(3000)]
    best = max(grid, key=lambda work: goodput(work, save, mtbf, 0.0))
    assert abs(daly(save, mtbf) - best) <= abs(young(save, mtbf) - best)
    assert goodput(daly(save, mtbf), save, mtbf, 60.0) == pytest.approx(
        goodput(best, save, mtbf, 60.0), rel=2e-3
    )


def test_daly_of_the_first_order_is_young_less_a_save() -> None:
    """Daly's series begins with sqrt(2 save mtbf) - save; the rest vanishes with save / mtbf."""
    save, mtbf = 1.0, 1e8
    assert daly(save, mtbf) == pytest.approx(sqrt(2 * save * mtbf) - save, rel=1e-4)
    assert daly(3 * HOUR, HOUR) == HOUR


def test_failures_that_were_seen_take_the_place_of_the_prior() -> None:
    assert between_failures(10 * HOUR, 0, 24 * HOUR) == 24 * HOUR
    assert between_failures(10 * HOUR, 4, 24 * HOUR) == 2.5 * HOUR
    assert between_failures(0.0, 1, 24 * HOUR) == 24 * HOUR


@pytest.mark.parametrize(
    ("save", "step", "every"), [(0.5, 0.1, 2934), (0.5, 1000.0, 1), (0.0, 0.1, 1), (1.0, 0.0, 1)]
)
def test_the_interval_in_whole_steps(save: float, step: float, every: int) -> None:
    assert steps_between(save, 24 * HOUR, step) == pytest.approx(every, abs=10)
