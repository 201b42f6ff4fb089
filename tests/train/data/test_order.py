"""The order of samples is a permutation per epoch, differs between epochs and seeds, and never changes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.train.data.order import sample_ids, samples_at


@settings(max_examples=80, deadline=None)
@given(samples=st.integers(1, 3000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**20))
def test_every_epoch_holds_every_sample_once(samples: int, seed: int, epoch: int) -> None:
    ids = sample_ids(seed, epoch * samples, samples, samples)
    assert ids.dtype == np.int64
    assert np.array_equal(np.sort(ids), np.arange(samples))


@pytest.mark.parametrize("samples", [*range(1, 140), 2**16 - 1, 2**16, 2**16 + 1, 170_428])
def test_bijection_at_the_edges(samples: int) -> None:
    ids = sample_ids(7, 5 * samples, samples, samples)
    assert np.array_equal(np.bincount(ids, minlength=samples), np.ones(samples))


@settings(max_examples=50, deadline=None)
@given(
    samples=st.integers(1, 50), first=st.integers(0, 500), count=st.integers(0, 200), cut=st.integers(0, 200)
)
def test_a_stretch_is_the_same_however_it_is_asked_for(
    samples: int, first: int, count: int, cut: int
) -> None:
    """Also over the borders of epochs, in two pieces, and in another order."""
    whole = sample_ids(1, first, count, samples)
    cut = min(cut, count)
    parts = [sample_ids(1, first, cut, samples), sample_ids(1, first + cut, count - cut, samples)]
    assert np.array_equal(whole, np.concatenate(parts))
    backwards = samples_at(1, np.arange(first, first + count)[::-1], samples)
    assert np.array_equal(whole[::-1], backwards)


def test_epochs_and_seeds_differ() -> None:
    orders = [tuple(sample_ids(seed, epoch * 1000, 1000, 1000)) for seed in range(4) for epoch in range(4)]
    assert len(set(orders)) == len(orders)


def test_far_positions_and_huge_datasets() -> None:
    ids = sample_ids(3, 2**62, 1000, 2**40 + 3)
    assert ids.min() >= 0 and ids.max() < 2**40 + 3
    assert len(np.unique(ids)) == 1000


def test_looks_random() -> None:
    """Places are uniform (chi squared over 16 x 16 cells) and neighbours are not kept together."""
    samples = 1 << 16
    ids = sample_ids(11, 0, samples, samples)
    cells = np.zeros((16, 16))
    np.add.at(cells, (np.arange(samples) * 16 // samples, ids * 16 // samples), 1)
    chi = ((cells - 256) ** 2 / 256).sum()  # 225 degrees of freedom; standard deviation 21
    assert 225 - 6 * 21 < chi < 225 + 6 * 21
    assert (np.abs(np.diff(ids)) == 1).mean() < 1e-3
    correlation = np.corrcoef(ids[:-1], ids[1:])[0, 1]
    assert abs(correlation) < 0.03


def test_small_sets_reach_every_order() -> None:
    orders = {tuple(sample_ids(seed, 0, 4, 4)) for seed in range(2000)}
    assert len(orders) == 24


def test_golden() -> None:
    """These values may never change: they are the order of everybody's runs."""
    assert sample_ids(0, 0, 8, 1000).tolist() == [120, 459, 654, 201, 267, 274, 822, 709]
    assert sample_ids(0, 996, 8, 1000).tolist() == [79, 373, 630, 720, 85, 634, 997, 364]
    assert sample_ids(1, 0, 8, 1000).tolist() == [803, 895, 760, 451, 415, 946, 802, 616]


def test_refuses_what_has_no_order() -> None:
    with pytest.raises(ValueError, match="no order"):
        sample_ids(0, 0, 1, 0)
    with pytest.raises(ValueError, match="from 0"):
        sample_ids(0, -1, 1, 5)
    assert sample_ids(0, 0, 0, 5).size == 0
