"""What every starter owes: each rank its own numbers, one place to meet, no guess, and nothing of another starter's."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from unisono.launch.starters import LOOPBACK, STARTERS, Environ, Started, Starter
from unisono.spec.errors import UsageError

RUNS = ((1,), (2,), (2, 1), (1, 2, 2))  # ranks on each host
OF_ONES = ((1, 1), (1, 1, 1))


def faults(member: Starter, folder: Path, text: str = "") -> Iterator[str]:
    """What is wrong with a starter, a sentence each. 1. Of the variables that it leaves it gives every rank its
    numbers, and all ranks one place to meet. 2. A set of them that lacks one is refused in words that name it, unless
    it means the same; without the one by which it knows itself it may know nothing. 3. Starters that are asked later
    keep their runs, and those that are asked before leave it its own."""
    for hosts in OF_ONES if member.one_a_host else RUNS:
        yield from (f"ranks on hosts {hosts}: {fault}" for fault in _of_run(member, hosts))
    for host in (0, 1):
        yield from _of_parts(member, member.leaves(host, 0, (1, 1) if member.one_a_host else (2, 1)))
    yield from _of_others(member)


def _seen(member: Starter, environ: Environ) -> Started | UsageError | None:
    try:
        return member.detect(environ)
    except UsageError as error:
        return error


def _of_run(member: Starter, hosts: Sequence[int]) -> Iterator[str]:
    seats = [(host, local) for host, ranks in enumerate(hosts) for local in range(ranks)]
    places: list[Started] = []
    for rank, (host, local) in enumerate(seats):
        place = _seen(member, member.leaves(host, local, hosts))
        if not isinstance(place, Started):
            yield f"rank {rank} is not recognised{f': {place.what}' if place else ''}"
            continue
        places.append(place)
        said = (place.rank, place.world, place.local_rank, place.local_world)
        if said != (wanted := (rank, len(seats), local, hosts[host])):
            yield f"rank, world, local rank and local world are {wanted}, and it says {said}"
    if len({place.rank for place in places}) < len(places):
        yield "two ranks have the same number"
    meeting = sorted({f"{place.master}:{place.port}" for place in places})
    if len(meeting) > 1 or (len(hosts) > 1 and any(place.master in LOOPBACK for place in places)):
        yield f"ranks cannot meet at {' and '.join(meeting)}"


def _of_parts(member: Starter, environ: Environ) -> Iterator[str]:
    whole, unknown = _seen(member, environ), []
    for name in environ:
        place = _seen(member, {key: value for key, value in environ.items() if key != name})
        if place is None:
            unknown.append(name)
        elif isinstance(place, UsageError):
            if name not in place.what:
                yield f"without {name} it says another thing than that this is missing: {place.what}"
        elif place != whole:
            yield f"without {name} it takes the environment, and says something else"
    if len(unknown) > 1:
        yield f"without one of {', '.join(unknown)} it knows nothing, and every rank would run alone"


def _of_others(member: Starter) -> Iterator[str]:
    if _seen(member, {}) is not None:
        yield "it claims an environment without variables"
    for other in (STARTERS.find(name)() for name in STARTERS.names()):
        if other == member:
            continue
        if other.turn == member.turn:
            yield f"its turn {member.turn} is that of {other.name}"
        before, after = (member, other) if member.turn < other.turn else (other, member)
        seat = (1, 0, (1, 1)) if after.one_a_host else (0, 1, (2,))
        if _seen(before, after.leaves(*seat)) is not None:
            yield f"a run of {after.name} is claimed by {before.name}, which is asked before"
