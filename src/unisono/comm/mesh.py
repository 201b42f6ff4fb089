"""The mesh: this rank's coordinates on the axes pp, dp, shard, cp, tp (outer to inner) and its groups."""

from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Self

import torch.distributed as dist

from unisono.comm.collectives import Collective
from unisono.comm.collectives.auto import Auto
from unisono.comm.group import Group
from unisono.comm.members import AXES, Members, Shape
from unisono.observe.span import Recorder

__all__ = ["AXES", "Mesh", "Shape"]


class Mesh:
    """Live groups of one rank. `replica` is all of a replica: every axis but dp.
    `states` is whoever deals out parameters and their states: `shard`, and with it `cp`. ordered, collective: see
    Group; the latter is for `dp` alone.

    members: who takes part; all ranks of the shape's world if None. Every member makes one, or it hangs.
    """

    def __init__(
        self,
        shape: Shape,
        rank: int,
        recorder: Recorder,
        timeout: timedelta,
        ordered: bool = False,
        collective: Collective = Auto(),
        members: Members | None = None,
    ) -> None:
        self.shape, self.rank, self.recorder = shape, rank, recorder
        self.members = members or Members.first(shape.world)
        self._timeout, self._ordered, self._collective = timeout, ordered, collective
        self.at = shape.coordinates(self.members.ranks.index(rank))
        self.shard = self.group("shard", ("shard",))
        self.tp = self.group("tp", ("tp",))
        self.cp = self.group("cp", ("cp",))
        # Two groups for the pipeline, one a direction: a backend that runs each group's operations in order
        # (NCCL) would deadlock when one rank sends an activation while its neighbour sends a gradient (see `pairs`).
        self.pp = self.group("pp", ("pp",))
        self.pp_back = self.group("pp", ("pp",))
        self.pp.apart = self.pp_back.apart = partial(self.group, "pp", ("pp",))
        self.replica = self.group("replica", ("pp", "shard", "cp", "tp"))
        # Ranks of cp have gradients to add up that ranks of shard scatter: both in one.
        self.states = (
            self.shard if shape.cp == 1 or shape.shard == 1 else self.group("shard", ("shard", "cp"))
        )
        self._over = {
            frozenset({"shard"}): self.shard,
            frozenset({"tp"}): self.tp,
            frozenset({"cp"}): self.cp,
        }
        self._meet()

    def _meet(self) -> None:
        """The groups across replicas."""
        self.dp = self.group("dp", ("dp",))
        self.dp.apart = partial(self.group, "dp", ("dp",))
        self.data = self.group("data", ("dp", "shard"))
        self.world = self.group("world", AXES)

    def over(self, axes: frozenset[str]) -> Group:
        """The group of this rank over these axes of its replica, made once. All its members call it the first time, or
        it hangs."""
        if axes not in self._over:
            self._over[axes] = self.group("+".join(sorted(axes)), axes)
        return self._over[axes]

    def keep(self, axes: frozenset[str], group: Group) -> None:
        """Let `over` give this group for a name that is no axis of the mesh."""
        self._over[axes] = group

    def dealt(self, ep: int) -> tuple[Group, Group]:
        """Of the ranks of shard, cp and tp in this rank's stage, the innermost first: those `ep` among which experts or
        tables are dealt, and those that hold the same part as this one. All their members call it the first time, or it
        hangs."""
        axes = ("shard", "cp", "tp")
        ranks = self.peers(axes)
        part, place = divmod(ranks.index(self.rank), ep)
        for name, members in (("ep", ranks[part * ep : part * ep + ep]), ("holders", ranks[place::ep])):
            key = frozenset({name, str(ep)})
            if key not in self._over:
                self._over[key] = self.group_of(name, members)
        return self._over[frozenset({"ep", str(ep)})], self._over[frozenset({"holders", str(ep)})]

    def joined(self, members: Members) -> Self:
        """This mesh among other replicas: groups across them are new, those inside this one stay as they are.

        Every one of `members` calls it, or it hangs. Raises ValueError where they are not whole replicas.
        """
        mesh = copy(self)
        inner = self.shape.world // self.shape.dp
        mesh.members, mesh.shape = members, replace(self.shape, dp=len(members.ranks) // inner)
        mesh.at = mesh.shape.coordinates(members.ranks.index(self.rank))
        if mesh.shape.world != len(members.ranks) or mesh.peers(("pp", "shard", "cp", "tp")) != list(
            self.replica.ranks
        ):
            raise ValueError(f"{members.ranks} are not whole replicas, rank {self.rank}'s among them")
        mesh._meet()
        return mesh

    def lockstep(self, size: int) -> Self:
        """This mesh as a step sees it in which `size` neighbouring replicas alone meet: `dp`, `data` and `world` are
        those of them. Its coordinates stay those of the whole. Every rank calls it, or it hangs."""
        mesh, place = copy(self), self.dp.index // size * size
        if size == 1:
            mesh.dp, mesh.data, mesh.world = self.group_of("dp", [self.rank]), self.shard, self.replica
            return mesh
        mesh.dp = self.group_of("dp", list(self.dp.ranks[place : place + size]))
        mesh.dp.apart = partial(self.group_of, "dp", list(mesh.dp.ranks))
        for name, axes in (("data", ("dp", "shard")), ("world", AXES)):
            near = [rank for rank in self.peers(axes) if place <= self._replica_of(rank) < place + size]
            setattr(mesh, name, self.group_of(name, sorted(near)))
        return mesh

    def across(self, size: int) -> Group:
        """Of each `size` neighbouring replicas the one in the same place as this rank's, in order. Every rank calls it,
        or it hangs."""
        return (
            self.dp if size == 1 else self.group_of("dp", list(self.dp.ranks[self.dp.index % size :: size]))
        )

    def _replica_of(self, rank: int) -> int:
        """The coordinate on `dp` of a rank."""
        return self.shape.coordinates(self.members.ranks.index(rank))["dp"]

    def peers(self, axes: Iterable[str]) -> list[int]:
        """Ranks whose coordinates equal this one's on all axes but the given ones."""
        places = self.shape.peers(self.members.ranks.index(self.rank), axes)
        return [self.members.ranks[place] for place in places]

    def group(self, name: str, axes: Iterable[str]) -> Group:
        """The group of this rank over the given axes, over several of them by rank, which torch sorts by too. Every
        member of the group calls it, or it hangs."""
        axes = tuple(axes)
        return self.group_of(name, self.peers(axes) if len(axes) == 1 else sorted(self.peers(axes)))

    def group_across(self, name: str, ranks: list[int]) -> Group:
        """A group of the given ranks, of which this one is a member, where other ranks may have no such group: they
        give themselves alone. Every rank of the mesh calls it, or a later group of all hangs.

        torch names a group after its members and after how many groups a rank has by then, so all have to have as many.
        """
        if len(ranks) == 1 and self.shape.world > 1:
            dist.new_group(ranks, timeout=self._timeout, use_local_synchronization=True, group_desc=name)
        return self.group_of(name, ranks)

    def group_of(self, name: str, ranks: list[int]) -> Group:
        """A group of the given ranks, of which this one is a member, where every rank of the mesh is in such a one of
        as many ranks."""
        pg = None
        if len(ranks) > 1:
            group = dist.new_group(
                ranks, timeout=self._timeout, use_local_synchronization=True, group_desc=name
            )
            pg = group if isinstance(group, dist.ProcessGroup) else None
        how = self._collective if name == "dp" else Auto()
        return Group(name, ranks, ranks.index(self.rank), pg, self.recorder, self._ordered, how)
