"""Find who has gone when a message or a collective of a group fails: all ranks that are left name the same one.

Gloo says that a connection was closed, and not whose. So a rank that fails looks at all its connections of the group: a
receive that is posted on a broken one fails at once. Behind it may be a rank that left because of a third. Therefore
each puts down, in the store that ranks met over, whom it blames. Then it breaks its own connections of the group, so
that nobody waits for it in vain: who waits for it reads there who is to blame.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unisono.comm.collectives import Done, Pending
from unisono.comm.device import between_cpus
from unisono.comm.tags import UNANSWERED
from unisono.observe.calls import LoggedCall
from unisono.spec.errors import PeerGone

_CLOSED = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "likely closed",
    "timed out waiting",
)  # as Gloo says
_SOON = timedelta(milliseconds=1)
_LINGER = timedelta(seconds=3)


class WorldEnded(RuntimeError):
    """Raised in every rank on a thread that waits when another one has raised, or when all wait for each other."""


class PeerFailureContext:
    """A context in which a group waits: an error that only says that a connection was closed names who has gone."""

    def __init__(self, pg: Any, doing: str, inner: AbstractContextManager[Any]) -> None:
        self._pg, self._doing, self._inner = pg, doing, inner

    def __enter__(self) -> None:
        self._inner.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._inner.__exit__(kind, error, trace)
        if isinstance(error, RuntimeError) and (better := named(self._pg, error, self._doing)) is not error:
            raise better from error


class NamedWork:
    """A pending operation of a group that names who has gone. pending: the operation itself. call: its entry in the
    log of this rank's calls, if it has one."""

    def __init__(self, pg: Any, doing: str, pending: Pending, call: LoggedCall | None = None) -> None:
        self.pending, self._pg, self._doing, self._over = pending, pg, doing, False
        self._call = call

    @property
    def get_future(self) -> Any:
        """That of the operation, by which who is asked to can see when it was over; None where it has none."""
        return getattr(self.pending, "get_future", None)

    def wait(self, within: timedelta | None = None) -> None:
        """Returns when it is over. within: of a message, how long to wait at most. Raises PeerGone, and what the
        process group raises where a member is late."""
        if self._over:
            return  # a message of Gloo's would be waited for once more
        pending: Any = self.pending
        if self._call is not None:
            self._call.wants()
        try:
            pending.wait() if within is None or not isinstance(pending, dist.Work) else pending.wait(within)
        except RuntimeError as error:
            if (better := named(self._pg, error, self._doing)) is error:
                raise
            raise better from error
        self._over = True
        if self._call is not None:
            self._call.ends()


def started(pg: Any, doing: str, begin: Any, *args: Any, call: LoggedCall | None = None) -> Pending:
    """What `begin(*args)` begins, so that who has gone is named then and when it is waited for. call: see NamedWork."""
    try:
        pending = begin(*args)
    except RuntimeError as error:
        if (better := named(pg, error, doing)) is error:
            raise
        raise better from error
    if pending is not None and not isinstance(pending, Done):
        return NamedWork(pg, doing, pending, call)
    if call is not None:
        call.ends()
    return Done()


def named(pg: Any, error: RuntimeError, doing: str) -> RuntimeError:
    """PeerGone if `error` means that ranks of the group have gone; else `error` itself."""
    words = str(error).lower()
    if isinstance(error, PeerGone) or not between_cpus(pg) or not any(word in words for word in _CLOSED):
        return error
    ranks, looked = (
        dist.get_process_group_ranks(pg),
        [(group, *_sorted(group)) for group in (pg, *_parts(pg))],
    )
    broken = {dist.get_process_group_ranks(group)[i] for group, _, places in looked for i in places}
    alive = [i for i in looked[0][1] if ranks[i] not in broken]
    gone = {_blamed(rank) for rank in broken or [ranks[i] for i in alive]} - {dist.get_rank()}
    if not broken:  # it was too late, or not our connection: somebody may have told why
        gone -= {ranks[i] for i in alive}
    if not gone:
        return error
    first, *others = sorted(gone)
    _tell(dist.get_rank(), first)
    for group, places, _ in looked:
        _break_off(group, places)
    _linger([ranks[i] for i in alive])
    who = f"ranks {', '.join(map(str, (first, *others)))} have" if others else f"rank {first} has"
    return PeerGone(
        f"{who} gone; rank {dist.get_rank()} waited in {doing}",
        likely="it was killed, or failed: what it printed last says more",
        rank=first,
    )


def described(pg: Any) -> str:
    """What describes a group of some members of this one, in which they wait for each other for its operations."""
    return f"part of {pg.group_name}"


def _parts(pg: Any) -> list[Any]:
    return [group for group in dist.distributed_c10d._world.pg_map if group.group_desc == described(pg)]


def _sorted(pg: Any) -> tuple[list[int], list[int]]:
    """Places of the other members to which there is a connection, and of those to which it is broken."""
    alive, broken, posted = list[int](), list[int](), list[Any]()
    for place in range(pg.size()):
        if place != pg.rank():
            try:
                posted.append(pg.recv([torch.zeros(1)], place, UNANSWERED.first))
                alive.append(place)
            except RuntimeError:
                broken.append(place)
    return alive, broken


def _break_off(pg: Any, alive: Iterable[int]) -> None:
    """Close this rank's connections of the group: Gloo does so where a receive is late."""
    for place in alive:
        with suppress(RuntimeError):
            pg.recv([torch.zeros(1)], place, UNANSWERED.first).wait(_SOON)


def _blamed(rank: int) -> int:
    """Return the rank that has gone first, as far as is known: this rank, or the one that it blamed before it left."""
    seen = set[int]()
    with suppress(RuntimeError, ValueError):  # the store was with one that has gone
        store = dist.distributed_c10d._get_default_store()
        while rank not in seen and store.check([_key(rank)]):
            seen.add(rank)
            rank = int(store.get(_key(rank)))
    return rank


def _tell(rank: int, blamed: int) -> None:
    with suppress(RuntimeError, ValueError):
        dist.distributed_c10d._get_default_store().set(_key(rank), str(blamed))


def _linger(ranks: Iterable[int]) -> None:
    """Stay until these ranks have put down whom they blame, and so have read it: the store may be with this one."""
    with suppress(RuntimeError, ValueError):
        dist.distributed_c10d._get_default_store().wait([_key(rank) for rank in ranks], _LINGER)


def _key(rank: int) -> str:
    return f"unisono/gone/{rank}"
