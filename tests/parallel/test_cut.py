"""Stages: consecutive, complete, and no cut would have been better."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.programs.balance import balance

costs = st.lists(st.integers(1, 9), min_size=1, max_size=8)


def dearest(costs, first, last, edges):
    n = len(costs)
    return max(sum(costs[lo:hi]) + first * (lo == 0) + last * (hi == n) for lo, hi in pairwise(edges))


@settings(deadline=None)
@given(costs, st.integers(0, 9), st.integers(0, 20), st.data())
def test_no_other_cut_is_cheaper(costs, first, last, data):
    n = len(costs)
    stages = data.draw(st.integers(1, n))
    cuts = balance(costs, first, last, stages)
    assert [i for blocks in cuts for i in blocks] == list(range(n))
    assert len(cuts) == stages and all(cuts)
    own = dearest(costs, first, last, [0, *(blocks.stop for blocks in cuts)])
    best = min(dearest(costs, first, last, [0, *inner, n]) for inner in combinations(range(1, n), stages - 1))
    assert own == best


def test_a_dear_head_gets_fewer_blocks():
    assert [len(blocks) for blocks in balance([1.0] * 4, 0.0, 2.0, 2)] == [3, 1]


def test_more_stages_than_blocks_is_refused():
    with pytest.raises(ValueError, match="2 blocks"):
        balance([1.0, 1.0], 0.0, 0.0, 3)
