"""Who computes which leaves: whoever takes part, every leaf once, in order, and the same for the same members."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.comm.members import Members, Shape, assign, stretches_of
from unisono.comm.tree import split

shapes = st.builds(
    Shape, pp=st.integers(1, 3), dp=st.integers(1, 5), shard=st.integers(1, 4), tp=st.integers(1, 2)
)


def members_of(shape: Shape, seed: int) -> Members:
    """Ranks in some order, with gaps: others have left."""
    return Members(3, tuple((place * 7 + seed) % 1009 for place in range(shape.world)))


@given(shapes, st.integers(1, 4), st.integers(0, 500), st.data())
def test_every_leaf_is_computed_once_in_the_order_of_replicas(
    shape: Shape, each: int, seed: int, data: st.DataObject
) -> None:
    units = shape.dp * each
    speeds = data.draw(st.none() | st.lists(st.floats(0.1, 10), min_size=shape.dp, max_size=shape.dp))
    members, leaves = members_of(shape, seed), units * shape.shard
    dealt = assign(leaves, shape, members, speeds)
    assert set(dealt) == set(members.ranks)
    at = {rank: shape.coordinates(place) for place, rank in enumerate(members.ranks)}
    ends = 0
    for dp in range(shape.dp):
        mine = {rank: dealt[rank] for rank in members.ranks if at[rank]["dp"] == dp}
        assert len({len(own) for own in mine.values()}) == 1 and all(mine.values()), "shards go in step"
        whole = sorted({leaf for own in mine.values() for leaf in own})
        assert whole == list(range(ends, ends + len(whole))), "a replica's leaves are a stretch"
        ends += len(whole)
    assert ends == leaves
    for rank, own in dealt.items():
        twins = [
            other
            for other in members.ranks
            if (at[other]["dp"], at[other]["shard"]) == (at[rank]["dp"], at[rank]["shard"])
        ]
        assert all(dealt[other] == own for other in twins), "stages and slices share a batch"
    assert dealt == assign(leaves, shape, members, speeds), "a function of its arguments"


@given(st.integers(1, 6), st.integers(1, 40), st.data())
def test_faster_replicas_get_no_less(replicas: int, each: int, data: st.DataObject) -> None:
    speeds = sorted(data.draw(st.lists(st.floats(0.1, 10), min_size=replicas, max_size=replicas)))
    leaves = replicas * each
    counts = [
        len(own) for own in assign(leaves, Shape(dp=replicas), Members.first(replicas), speeds).values()
    ]
    assert all(after >= before - 1 for before, after in itertools.pairwise(counts))
    done = [count / speed for count, speed in zip(counts, speeds, strict=True)]
    last = max(range(replicas), key=done.__getitem__)
    if counts[last] > 1:  # nobody could take one from the last and be done sooner
        assert all((counts[i] + 1) / speeds[i] >= done[last] - 1e-9 for i in range(replicas) if i != last)


def nodes_of(low: int, high: int) -> set[tuple[int, int]]:
    """All branches of the tree over [low, high)."""
    if high - low == 1:
        return {(low, high)}
    middle = low + split(high - low)
    return {(low, high)} | nodes_of(low, middle) | nodes_of(middle, high)


@given(st.integers(1, 6), st.integers(0, 4), st.integers(1, 3), st.data())
def test_whole_branches_go_by_speed_too(replicas: int, power: int, shards: int, data: st.DataObject) -> None:
    units = replicas << power
    speeds = data.draw(st.lists(st.floats(0.1, 10), min_size=replicas, max_size=replicas))
    stretches = stretches_of(units * shards, replicas, shards, speeds, branches=True)
    branches = [(part.start // shards, part.stop // shards) for part in stretches]
    assert set(branches) <= nodes_of(0, units) and len(set(branches)) == replicas
    assert sorted(leaf for part in stretches for leaf in part) == list(range(units * shards))
    sizes = [high - low for low, high in branches]
    assert all(size & (size - 1) == 0 for size in sizes)
    for i, j in itertools.permutations(range(replicas), 2):
        assert speeds[i] <= speeds[j] or sizes[i] >= sizes[j], "the quicker has no less"
    ends = max(size / speed for size, speed in zip(sizes, speeds, strict=True))
    assert ends <= (1 << power) / min(speeds) + 1e-9, "never later than with equal branches"


def test_a_replica_five_times_as_slow_gets_half_a_share_of_whole_branches() -> None:
    assert [len(part) for part in stretches_of(32, 4, 1, [1.0, 0.2, 1.0, 1.0], branches=True)] == [
        16,
        4,
        8,
        4,
    ]
    assert [len(part) for part in stretches_of(32, 4, 1, [1.0, 0.2, 1.0, 1.0])] == [10, 2, 10, 10]
    for leaves, replicas in ((7, 2), (3, 4)):
        with pytest.raises(ValueError, match="whole branches"):
            stretches_of(leaves, replicas, 1, [1.0] * replicas, branches=True)


def test_equal_members_get_equal_stretches_whatever_their_numbers() -> None:
    assert dict(assign(8, Shape(dp=2, shard=2), Members(1, (9, 4, 2, 7)))) == {
        9: range(0, 4, 2), 4: range(1, 4, 2), 2: range(4, 8, 2), 7: range(5, 8, 2)
    }  # fmt: skip


def test_what_cannot_be_dealt_is_refused() -> None:
    for leaves, shape in ((6, Shape(dp=4)), (2, Shape(dp=1, shard=4)), (3, Shape(dp=3, shard=2))):
        with pytest.raises(ValueError, match="cannot be distributed"):
            assign(leaves, shape, Members.first(shape.world))
    with pytest.raises(ValueError, match="speeds"):
        assign(4, Shape(dp=2), Members.first(2), [1.0, 0.0])
    with pytest.raises(ValueError, match="do not fill"):
        assign(4, Shape(dp=2), Members.first(3))
    with pytest.raises(ValueError, match="twice"):
        Members.first(2).now((1, 1))
    assert Members.first(2).now((1,)) == Members(1, (1,))
