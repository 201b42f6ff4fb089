"""How a run is spread over hosts, from one meeting of its ranks to the next: values, and pure functions. No torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RunSpread:
    """plan: as text. ranks: that it takes. speeds: of its replicas, by which leaves are dealt; alike if empty. why: in
    words, where it is not what the run began with."""

    plan: str
    ranks: int
    speeds: tuple[float, ...] = ()
    why: str = ""

    def as_json(self) -> dict[str, Any]:
        """As ranks get it; nothing where ranks are not told of a plan."""
        return {"plan": self.plan, "speeds": list(self.speeds)} if self.plan else {}


Place = tuple[int, int]
"""A host's number, and one there."""
Choice = Callable[[int, str], RunSpread | None]
"""There is room for so many ranks, which settled this plan at their start: how to go on; None where it cannot."""


def places(room: Mapping[int, int], ranks: int, held: Sequence[Place] = ()) -> list[Place]:
    """Of each rank in turn: hosts in their order, each as full as it gets; those first that have ranks already. room:
    of each host, by number. held: places of processes that live. Raises ValueError where there are too few."""
    at_work = {host for host, _ in held}
    free = [
        (host, index)
        for host in sorted(room, key=lambda host: (host not in at_work, host))
        for index in range(room[host])
    ]
    if len(free) < ranks:
        raise ValueError(f"{ranks} ranks, and room for {len(free)}")
    # A process that lives is not given up for a new one beside it.
    kept = set(held)
    first = sorted(free, key=lambda place: place not in kept)[:ranks]
    return sorted(first)


def among_host(chosen: Sequence[Place], rank: int) -> tuple[int, int]:
    """(number of a rank among those of its host, how many there are)."""
    own = [index for index, (host, _) in enumerate(chosen) if host == chosen[rank][0]]
    return own.index(rank), len(own)
