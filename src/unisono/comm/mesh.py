"""The mesh: this rank's coordinates on the axes pp, dp, shard, cp, tp (outer to inner) and its groups."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from unisono.comm.collectives import Collective
from unisono.comm.collectives.auto import Auto
from unisono.comm.group import Group
from unisono.observe.span import Recorder

AXES = ("pp", "dp", "shard", "cp", "tp")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the axes; their product is the world."""

    pp: int = 1
    dp: int = 1
    shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.shard * self.cp * self.tp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis → coordinate of a global rank; tp varies fastest."""
        out: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, out[axis] = divmod(rank, getattr(self, axis))
        return {axis: out[axis] for axis in AXES}

    def rank(self, at: Mapping[str, int]) -> int:
        """Inverse of `coordinates`."""
        rank = 0
        for axis in AXES:
            rank = rank * getattr(self, axis) + at[axis]
        return rank

    def peers(self, rank: int, axes: Iterable[str]) -> list[int]:
        """Global ranks whose coordinates equal `rank`'s on all axes but the given ones, in order."""
        own, free = self.coordinates(rank), set(axes)
        fixed = [axis for axis in AXES if axis not in free]
        return [
            other
            for other in range(self.world)
            if all(self.coordinates(other)[axis] == own[axis] for axis in fixed)
        ]


class Mesh:
    """Live groups of one rank. `replica` is all of a replica: every axis but dp. ordered, collective: see Group; the
    latter is for `dp` alone."""

    def __init__(
        self,
        shape: Shape,
        rank: int,
        recorder: Recorder,
        timeout: timedelta,
        ordered: bool = False,
        collective: Collective = Auto(),
    ) -> None:
        self.shape, self.rank, self.recorder = shape, rank, recorder
        self._timeout, self._ordered, self._collective = timeout, ordered, collective
        self.at = shape.coordinates(rank)
        self.dp = self.group("dp", ("dp",))
        self.shard = self.group("shard", ("shard",))
        self.tp = self.group("tp", ("tp",))
        # Two groups for the pipeline, one a direction: a backend that runs each group's operations in order
        # (NCCL) would deadlock when one rank sends an activation while its neighbour sends a gradient.
        self.pp = self.group("pp", ("pp",))
        self.pp_back = self.group("pp", ("pp",))
        self.data = self.group("data", ("dp", "shard"))
        self.replica = self.group("replica", ("pp", "shard", "cp", "tp"))
        self.world = self.group("world", AXES)
        self._over = {frozenset({"shard"}): self.shard, frozenset({"tp"}): self.tp}

    def over(self, axes: frozenset[str]) -> Group:
        """The group of this rank over these axes of its replica, made once. All its members call it the first time, or
        it hangs."""
        if axes not in self._over:
            self._over[axes] = self.group("+".join(sorted(axes)), axes)
        return self._over[axes]

    def group(self, name: str, axes: Iterable[str]) -> Group:
        """The group of this rank over the given axes; each call of the same on all its members."""
        return self.group_of(name, self.shape.peers(self.rank, axes))

    def group_of(self, name: str, ranks: list[int]) -> Group:
        """A group of the given ranks, of which this one is a member."""
        pg = None
        if len(ranks) > 1:
            made = dist.new_group(ranks, timeout=self._timeout, use_local_synchronization=True)
            pg = made if isinstance(made, dist.ProcessGroup) else None
        how = self._collective if name == "dp" else Auto()
        return Group(name, ranks, ranks.index(self.rank), pg, self.recorder, self._ordered, how)
