"""Who takes part in a run, and who computes which leaves of its steps: values, and pure functions of them. No torch.

A run's meaning is its global batch, a fixed list of leaves (micro-batches); which member computes which of them may
change between two steps. Places on the mesh are counted 0, 1, ...; which rank stands on each, `Members` says.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from unisono.comm.branches import branches_by_speed

AXES = ("pp", "dp", "shard", "cp", "tp")

Assignment = Mapping[int, range]
"""Rank of a member → the leaves that it computes, ascending. Ranks that share a batch (tp, pp) share leaves."""


@dataclass(frozen=True, slots=True)
class Members:
    """Ranks that take part, in the order of the mesh's places. epoch: how often they have changed."""

    epoch: int
    ranks: tuple[int, ...]

    @classmethod
    def first(cls, world: int) -> Self:
        """All ranks of a world, as it begins."""
        return cls(0, tuple(range(world)))

    def now(self, ranks: Iterable[int]) -> Self:
        """The next members. Raises ValueError for a rank given twice."""
        following = tuple(ranks)
        if len(set(following)) != len(following):
            raise ValueError(f"a rank takes part twice: {following}")
        return type(self)(self.epoch + 1, following)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the axes; their product is the number of members."""

    pp: int = 1
    dp: int = 1
    shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.shard * self.cp * self.tp

    def coordinates(self, place: int) -> dict[str, int]:
        """Axis → coordinate of a place; tp varies fastest."""
        out: dict[str, int] = {}
        for axis in reversed(AXES):
            place, out[axis] = divmod(place, getattr(self, axis))
        return {axis: out[axis] for axis in AXES}

    def rank(self, at: Mapping[str, int]) -> int:
        """Inverse of `coordinates`."""
        place = 0
        for axis in AXES:
            place = place * getattr(self, axis) + at[axis]
        return place

    def peers(self, place: int, axes: Iterable[str]) -> list[int]:
        """Places whose coordinates equal this one's on all axes but the given ones, in order."""
        mine, free = self.coordinates(place), set(axes)
        fixed = [axis for axis in AXES if axis not in free]
        return [
            other
            for other in range(self.world)
            if all(self.coordinates(other)[axis] == mine[axis] for axis in fixed)
        ]


def ordered(shape: Shape, order: Iterable[str]) -> Members:
    """All ranks of a shape as it begins. order: axes along which ranks are numbered, the innermost first; the others
    follow, tp before pp."""
    axes = tuple(dict.fromkeys((*order, *reversed(AXES))))

    def rank(place: int) -> int:
        at, number = shape.coordinates(place), 0
        for axis in reversed(axes):
            number = number * getattr(shape, axis) + at[axis]
        return number

    return Members(0, tuple(rank(place) for place in range(shape.world)))


def assign(
    leaves: int,
    shape: Shape,
    members: Members,
    speeds: Sequence[float] | None = None,
    branches: bool = False,
) -> Assignment:
    """Assign the leaves of a step to members: to each replica a stretch of them, which its shards take in turn.

    So the sum over the shards of one micro-batch, then over micro-batches, then over replicas, is one tree. speeds: of
    each replica, to which its number of leaves is proportional; all alike if None. branches: each replica's stretch is
    a whole branch of the tree over the micro-batches, with 2^k of them. Raises ValueError where the leaves cannot be
    assigned.
    """
    if len(members.ranks) != shape.world:
        raise ValueError(f"{len(members.ranks)} members do not fill a mesh of {shape.world}")
    stretches = stretches_of(leaves, shape.dp, shape.shard, speeds, branches)
    out: dict[int, range] = {}
    for place, rank in enumerate(members.ranks):
        at = shape.coordinates(place)
        stretch = stretches[at["dp"]]
        out[rank] = range(stretch.start + at["shard"], stretch.stop, shape.shard)
    return out


def stretches_of(
    leaves: int, replicas: int, shards: int, speeds: Sequence[float] | None = None, branches: bool = False
) -> list[range]:
    """The leaves of each replica, as `assign` assigns them: stretches_of(8, 2, 1, [3.0, 1.0]) is [range(6),
    range(6, 8)]."""
    if branches and speeds is not None:
        _check_speeds(replicas, speeds)
        units, rest = divmod(leaves, shards)
        cut = [] if rest else branches_by_speed(units, speeds)
        if not cut:
            what = f"{leaves} leaves cannot be distributed over {replicas} replicas of {shards} shards"
            raise ValueError(f"{what} as whole branches")
        return [range(low * shards, high * shards) for low, high in cut]
    ends = [0]
    for size in _sizes(leaves, replicas, shards, speeds):
        ends.append(ends[-1] + size)
    return [range(low, high) for low, high in pairwise(ends)]


def _sizes(leaves: int, replicas: int, unit: int, speeds: Sequence[float] | None) -> list[int]:
    """Leaves of each replica, multiples of `unit`: at least one unit each, and so that the last is done soonest."""
    units, rest = divmod(leaves, unit)
    if rest or units < replicas or (speeds is None and units % replicas):
        raise ValueError(f"{leaves} leaves cannot be distributed over {replicas} replicas of {unit} shards")
    if speeds is None:
        return [leaves // replicas] * replicas
    _check_speeds(replicas, speeds)
    counts = [1] * replicas
    for _ in range(units - replicas):  # each to whoever is done with it first
        first = min(range(replicas), key=lambda i: ((counts[i] + 1) / speeds[i], i))
        counts[first] += 1
    return [count * unit for count in counts]


def _check_speeds(replicas: int, speeds: Sequence[float]) -> None:
    if len(speeds) != replicas or min(speeds) <= 0:
        raise ValueError(f"{replicas} replicas need as many speeds above 0, not {list(speeds)}")
