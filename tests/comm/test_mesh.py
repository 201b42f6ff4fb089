"""Coordinates: every rank has one place, tp varies fastest, peers agree on who they are."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from unisono.comm.mesh import AXES, Shape
from unisono.plan import Plan
from unisono.planner.machines.order import USUAL, stride

shapes = st.builds(
    Shape,
    **{axis: st.integers(1, 3) for axis in AXES},  # at most 243 ranks
)


@given(shapes)
def test_coordinates_and_ranks_are_inverse(shape):
    seen = set()
    for rank in range(shape.world):
        at = shape.coordinates(rank)
        assert shape.rank(at) == rank
        seen.add(tuple(at.values()))
    assert len(seen) == shape.world


@given(shapes, st.sets(st.sampled_from(AXES)), st.data())
def test_peers_partition_the_world(shape, axes, data):
    rank = data.draw(st.integers(0, shape.world - 1))
    peers = shape.peers(rank, axes)
    size = 1
    for axis in axes:
        size *= getattr(shape, axis)
    assert rank in peers and len(peers) == size and peers == sorted(peers)
    assert all(shape.peers(other, axes) == peers for other in peers)


def test_axes_from_outer_to_inner():
    shape = Shape(pp=2, dp=2, tp=2)
    assert shape.peers(0, ["tp"]) == [0, 1]
    assert shape.peers(0, ["dp"]) == [0, 2]
    assert shape.peers(0, ["pp"]) == [0, 4]


@given(shapes, st.data())
def test_ranks_are_numbered_as_the_planner_prices_them(shape, data):
    plan = Plan(**{axis: getattr(shape, axis) for axis in AXES})
    rank = data.draw(st.integers(0, shape.world - 1))
    assert tuple(reversed(AXES)) == USUAL
    for axis in AXES:
        peers = shape.peers(rank, [axis])
        assert all(b - a == stride(plan, axis) for a, b in pairwise(peers))
