"""Samples that are trained are distributed as those that are drawn, where prompts are admitted at training's pace."""

from collections import Counter

import numpy as np
import pytest

from unisono_contrib.report.lengths import distance
from unisono_contrib.train.samplers.pacing import PlayedSamples, play

STEPS, BATCH = 100, 16


def lengths(seed: int) -> np.ndarray:
    """A long tail, as answers of a model that thinks have."""
    return np.random.default_rng(seed).lognormal(4.0, 1.0, 500 * BATCH).astype(int) + 1


def ks(first: np.ndarray, second: np.ndarray) -> tuple[float, float]:
    return distance(Counter(first.tolist()), Counter(second.tolist()))


def played(seed: int, bound: int, paced: bool) -> tuple[PlayedSamples, np.ndarray]:
    drawn = lengths(seed)
    result = play(
        lambda number: int(drawn[number]),
        steps=STEPS,
        batch=BATCH,
        slots=32,
        update=40.0,
        bound=bound,
        paced=paced,
    )
    return result, drawn


@pytest.mark.parametrize("bound", [0, 1, 2, 4])
def test_all_that_is_admitted_is_trained_in_its_order_within_the_bound(bound: int) -> None:
    result, _ = played(1, bound, paced=True)
    assert result.trained == sorted(result.admitted) == list(range(STEPS * BATCH))
    assert max(result.staleness) == bound


@pytest.mark.parametrize("bound", [1, 2, 4])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_lengths_of_trained_samples_are_those_of_drawn_ones(bound: int, seed: int) -> None:
    """Against a second draw of the same lengths, so that the test does not compare a sample with itself."""
    paced, drawn = played(seed, bound, paced=True)
    statistic, limit = ks(drawn[paced.trained], lengths(seed + 100))
    assert statistic < limit


@pytest.mark.parametrize("bound", [1, 2, 4])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_batches_of_what_comes_first_are_shorter(bound: int, seed: int) -> None:
    """The bound is kept here too, and that is what throws long sequences away."""
    first, drawn = played(seed, bound, paced=False)
    statistic, limit = ks(drawn[first.trained], lengths(seed + 100))
    assert max(first.staleness) <= bound
    assert statistic > limit and drawn[first.trained].mean() < 0.9 * drawn.mean()


def test_a_bound_saves_time() -> None:
    seconds = [played(1, bound, paced=True)[0].seconds for bound in (0, 1, 2, 4)]
    assert seconds == sorted(seconds, reverse=True) and seconds[1] < 0.8 * seconds[0]
