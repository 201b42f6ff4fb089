"""Who is a member of a run, and where: roles, places on hosts, who stays when all meet anew, how often a member may be
lost. Values and pure functions. No torch."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Self

LIMIT = 5
"""Losses of one rank without a step between them, after which a run is given up."""


class Role(StrEnum):
    """What a worker does. Trainers and servers are the group: the run cannot go on without one of them, so that all
    meet anew when one is lost. The others stand beside it: they come and go, and are replaced one by one. A spare takes
    the place of a lost member of the group. An evaluator reads checkpoints, and meets nobody."""

    TRAINER = "trainer"
    SERVER = "server"
    CLIENT = "client"
    SAMPLER = "sampler"
    SPARE = "spare"
    EVALUATOR = "evaluator"


@dataclass(frozen=True, slots=True)
class RunSpread:
    """How a run is spread over its workers. plan: as text. ranks: size of the group. speeds: of the plan's replicas, by
    which leaves are shared out; equal if empty. why: in words, where it is not what the run began with. roles: by rank,
    trainers where nothing is said; those from `ranks` on stand beside the group."""

    plan: str
    ranks: int
    speeds: tuple[float, ...] = ()
    why: str = ""
    roles: tuple[Role, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """As workers get it; nothing where they are told of no plan."""
        return {"plan": self.plan, "speeds": list(self.speeds)} if self.plan else {}

    def role(self, rank: int) -> Role:
        return self.roles[rank] if rank < len(self.roles) else Role.TRAINER


Place = tuple[int, int]
"""A host's number, and one of its places."""
Choice = Callable[[int, str], RunSpread | None]
"""Given room for so many ranks, and the plan that ranks settled at their start: how to go on; None if impossible."""


def places(
    room: Mapping[int, int],
    ranks: int,
    held: Collection[Place] = (),
    spare: Collection[Place] = (),
    taken: Collection[Place] = (),
) -> list[Place]:
    """The place of each rank: hosts in order, each filled up; hosts that have workers come first. room: places of each
    host. held: places of processes that live, which are not given up for new ones. spare: places of spares, which come
    next. taken: places of other workers, which come last. Raises ValueError where there are too few.

    places({0: 2, 1: 2}, 3)   # [(0, 0), (0, 1), (1, 0)]
    """
    at_work = {host for host, _ in held}
    free = [
        (host, index)
        for host in sorted(room, key=lambda host: (host not in at_work, host))
        for index in range(room[host])
    ]
    if len(free) < ranks:
        raise ValueError(f"{ranks} ranks, and room for {len(free)}")
    first = sorted(free, key=lambda place: (place not in held, place not in spare, place in taken))
    return sorted(first[:ranks])


def among_host(chosen: Sequence[Place], rank: int) -> tuple[int, int]:
    """(number of a rank among those of its host, how many there are)."""
    neighbours = [index for index, (host, _) in enumerate(chosen) if host == chosen[rank][0]]
    return neighbours.index(rank), len(neighbours)


@dataclass(frozen=True, slots=True)
class Tries:
    """How often ranks were lost since the run last made a step. One that only loses ranks is given up: after `LIMIT`
    losses of the same rank. Of several that are lost one by one, as on a host without memory, each has its own count.
    hung: (rank, step) of each that was replaced because it stood still."""

    step: int = -1
    losses: Mapping[int | None, int] = field(default_factory=dict)
    hung: frozenset[tuple[int, int]] = frozenset()

    def stepped(self, step: int) -> Self:
        """The run has made its steps up to this one."""
        return self if step <= self.step else replace(self, step=step, losses={})

    def lost(self, ranks: Collection[int | None]) -> Self:
        """One more loss of each; without any rank, a connection or all of them were lost."""
        counts = dict(self.losses)
        for rank in ranks or (None,):
            counts[rank] = counts.get(rank, 0) + 1
        return replace(self, losses=counts)

    def may(self) -> bool:
        """Whether one more loss is worth a try."""
        return max(self.losses.values(), default=0) < LIMIT

    def may_hang(self, rank: int) -> bool:
        """Whether to replace a rank that stands still: not if it did so after the same step before."""
        return self.may() and (rank, self.step) not in self.hung

    def hanged(self, rank: int) -> Self:
        return replace(self, hung=self.hung | {(rank, self.step)})
