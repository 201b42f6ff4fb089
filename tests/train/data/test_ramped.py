"""A batch that grows: the samples of a run without a ramp, in their order, cut at other places."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from unisono.train.data.feed import Permuted
from unisono_contrib.config.sections.ramp import BatchRamp
from unisono_contrib.train.data.ramped import Ramped


class Numbers:
    """A data set whose samples are their numbers."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def fetch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(indices), torch.from_numpy(indices)


ramps = st.builds(
    lambda first, growth, stages, steps: BatchRamp(first, first + growth * stages, growth, steps),
    st.integers(1, 6), st.integers(1, 6), st.integers(1, 5), st.integers(1, 40),
)  # fmt: skip


def ramped(ramp: BatchRamp, samples: int, micro: int = 1) -> Ramped:
    of = partial(_of, Numbers(samples), micro)
    return Ramped(ramp, of)


def _of(dataset: Numbers, micro: int, global_batch: int, shift: int) -> Permuted:
    return Permuted(dataset, 3, global_batch, micro, shift=shift)


@given(ramps, st.integers(0, 60))
def test_a_step_begins_where_the_one_before_ends(ramp: BatchRamp, step: int) -> None:
    assert ramp.before(step) == sum(map(ramp.samples, range(step)))


@given(ramps)
def test_it_grows_from_the_first_size_to_the_last_and_stays_there(ramp: BatchRamp) -> None:
    sizes = [ramp.samples(step) for step in range(ramp.steps + 3)]
    assert sizes[0] == ramp.first and sizes == sorted(sizes) and set(sizes[ramp.steps :]) == {ramp.last}
    assert {size - ramp.first for size in sizes} <= set(range(0, ramp.last - ramp.first + 1, ramp.growth))


@given(ramps, st.integers(0, 30))
def test_the_order_of_samples_is_that_of_one_without_a_ramp(ramp: BatchRamp, first: int) -> None:
    """Also where a run begins in the middle, as a resumed one does, and over the ends of epochs."""
    feed, samples = ramped(ramp, 37 + ramp.last), list[int]()
    places = list[int]()
    for step in range(first, first + 12):
        leaves = feed.fetch(step, range(feed.count(step)))
        samples += [int(leaf.inputs) for leaf in leaves]
        places += [int(leaf.samples) for leaf in leaves]
        assert samples[-len(leaves) :] == [feed.samples_of(step, leaf)[0] for leaf in range(len(leaves))]
    begin = ramp.before(first)
    assert places == list(range(begin, begin + len(places)))
    plain = Permuted(Numbers(37 + ramp.last), 3, 1, 1)
    assert samples == [int(plain.fetch(place, range(1))[0].inputs) for place in places]


def test_leaves_of_a_step_may_be_read_by_different_ranks_and_again() -> None:
    ramp = BatchRamp(4, 12, 4, 6)
    one, other = ramped(ramp, 100, 2), ramped(ramp, 100, 2)

    def read(feed: Ramped, step: int, leaves: range) -> Sequence[int]:
        return torch.cat([leaf.inputs for leaf in feed.fetch(step, leaves)]).tolist()

    for step in (0, 5, 2, 9, 2):
        count = one.count(step)
        halves = read(other, step, range(count // 2)) + read(other, step, range(count // 2, count))  # type: ignore[operator]
        assert read(one, step, range(count)) == halves
        assert one.share(step, [0]) == pytest.approx(1 / count)
