"""The order of samples in parts: each once an epoch, whoever asks, and near each other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono_contrib.train.data.stream.order import WINDOW, PartOrder

GOLDEN = [3, 16, 8, 9, 12, 14, 13, 18, 0, 5]  # a change would reshuffle everybody's runs


def order_of(sizes: list[int]) -> PartOrder:
    return PartOrder(np.concatenate(([0], np.cumsum(sizes))).astype(np.int64))


SIZES = st.lists(st.integers(0, 7), min_size=1, max_size=3 * WINDOW).filter(any)


@settings(max_examples=40)
@given(sizes=SIZES, seed=st.integers(0, 2**63), epoch=st.integers(0, 1000), cut=st.integers(1, 9))
def test_each_sample_comes_once_an_epoch_however_it_is_read(
    sizes: list[int], seed: int, epoch: int, cut: int
) -> None:
    order = order_of(sizes)
    line = np.arange(epoch * len(order), (epoch + 2) * len(order), dtype=np.int64)
    whole = order.numbers_at(seed, line)
    for half in np.split(whole, 2):
        assert sorted(half.tolist()) == [*range(len(order))]
    pieces = [order_of(sizes).numbers_at(seed, line[i::cut]) for i in range(cut)]
    for i, piece in enumerate(pieces):
        assert piece.tolist() == whole[i::cut].tolist()


@settings(max_examples=30)
@given(sizes=SIZES, seed=st.integers(0, 2**63), epoch=st.integers(0, 9))
def test_the_parts_that_are_expected_are_those_that_are_read(sizes: list[int], seed: int, epoch: int) -> None:
    order = order_of(sizes)
    line = np.arange(epoch * len(order), (epoch + 1) * len(order), dtype=np.int64)
    for position, part in zip(line, order.part_of(order.numbers_at(seed, line)), strict=True):
        expected = order.parts_from(seed, int(position))
        assert part in expected and len(expected) <= 2 * WINDOW
        assert all(sizes[each] for each in expected)


def test_orders_differ_by_seed_and_epoch_and_are_fixed_for_good() -> None:
    order = order_of([5, 3, 0, 8, 4])
    line = np.arange(40)
    said = order.numbers_at(7, line)
    assert said.tolist() != order.numbers_at(8, line).tolist()
    assert said[:20].tolist() != said[20:].tolist()
    assert order.epoch(7, 0).parts.tolist() != order.epoch(7, 1).parts.tolist()
    assert said[:10].tolist() == GOLDEN
    with pytest.raises(ValueError, match="no order"):
        order_of([0]).numbers_at(0, line)
