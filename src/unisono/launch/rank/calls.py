"""What a rank has called, held beside what its neighbours have: the n-th call of a group is the same on all its ranks.

Gloo compares nothing. Where fewer bytes come than a rank waits for, its call returns as if all were well; where more
come, the process is aborted. So each rank puts down what it has called lately, and looks at the rank before it in every
group that it is in: where ranks differ at all, two neighbours do.
"""

import ctypes
import json
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from unisono.comm import begun
from unisono.comm.begun import RecordedCollective
from unisono.launch.inspect_schema import GroupCall, GroupCalls
from unisono.launch.rank_status import Frame, RankStatus, status_of
from unisono.spec.frames import is_foreign

Ask = tuple[str, int]
"""A group, in few letters, and the number of a call of it."""
Groups = dict[tuple[str, tuple[int, ...]], dict[int, RecordedCollective]]
_KEPT, _TOLD = 256, 64  # calls of a group
_ANY = zlib.crc32(b"")


class Ledger:
    """What ranks have to do alike and torch does not record: the main thread notes it, the watchdog reads it."""

    def __init__(self) -> None:
        self._pages: dict[tuple[str, tuple[int, ...]], deque[RecordedCollective]] = {}

    def note(self, group: str, ranks: tuple[int, ...], says: str, far: int) -> None:
        """This rank is about to do this together with `ranks`; "" if it is not known what. far: how far it is."""
        page = self._pages.setdefault((group, ranks), deque(maxlen=_KEPT))
        frame = sys._getframe(1)
        while frame.f_back is not None and is_foreign(frame.f_code.co_filename):
            frame = frame.f_back
        line = (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        page.append(
            RecordedCollective(
                page[-1].number + 1 if page else 1, says, says, True, (line,), far=far, axis=group
            )
        )

    def latest(self) -> Groups:
        return {key: {call.number: call for call in list(page)} for key, page in list(self._pages.items())}


class Calls:
    """This rank's latest calls, and its neighbours'. Used by one thread, over a store of all ranks; without one, there
    is nothing to compare with. since: groups made before are none of this meeting's, see `begun.groups_made`."""

    def __init__(self, rank: int, store: Any = None, ledger: Ledger | None = None, since: int = 0) -> None:
        self._rank, self._store, self._ledger, self._since = rank, store, ledger or Ledger(), since
        self._known: dict[str, dict[int, RecordedCollective]] = {}
        self.refuted: set[Ask] = set()

    def _look(
        self, frames: bool = False, source: Callable[..., Groups] = begun.latest
    ) -> dict[str, tuple[int, ...]]:
        """Take in what was called since; the groups that are alive, with their ranks."""
        ranks: dict[str, tuple[int, ...]] = {}
        known = {}
        for (name, members), calls in (source(frames, since=self._since) | self._ledger.latest()).items():
            label = begun.label(name, members)
            incarnation = next(iter(calls.values())).incarnation
            both = {
                n: call for n, call in self._known.get(label, {}).items() if call.incarnation == incarnation
            } | calls
            ranks[label], known[label] = members, {n: both[n] for n in sorted(both)[-_KEPT:]}
        self._known = known
        return ranks

    def lately(self, here: RankStatus) -> dict[str, GroupCalls]:
        """For who looks on from outside: each group's ranks and latest calls, by number, with the lines that made
        them."""
        ranks, shown = self._look(frames=True, source=begun.everywhere), dict[str, GroupCalls]()
        counts = {begun.label(*key): (key[1], *shown) for key, shown in begun.counts().items()}
        for label in {**self._known, **counts}:
            calls = self._known.get(label, {})
            members, number, axis = counts.get(label, (ranks.get(label, ()), None, ""))
            axis = axis or next((call.axis for call in calls.values()), "")
            last = {str(n): _shown(calls[n], here) for n in list(calls)[-_TOLD:]}
            shown[label] = GroupCalls(list(members), axis, number, last)
        return shown

    def compare(self) -> list[Ask]:
        """Put down what this rank has called; the first call that a neighbour has made otherwise, if there is one."""
        groups = self._look()
        says = {
            label: {n: zlib.crc32(calls[n].says.encode()) for n in list(calls)[-_TOLD:]}
            for label, calls in self._known.items()
        }
        self._store.set(f"watchdog/calls/{self._rank}", json.dumps(says))
        before = {label: ranks[ranks.index(self._rank) - 1] for label, ranks in groups.items()}
        for neighbour in sorted(set(before.values())):
            key = f"watchdog/calls/{neighbour}"
            theirs = json.loads(self._store.get(key)) if self._store.check([key]) else {}
            for label, calls in says.items():
                other = theirs.get(label, {}) if before[label] == neighbour else {}
                for number, digest in calls.items():
                    differ = len({digest, other.get(str(number), digest), _ANY}) > 2
                    if differ and (label, number) not in self.refuted:
                        return [(label, number)]
        return []

    def pending(self) -> list[Ask]:
        """The collectives that this rank waits for."""
        self._look()
        return [
            (label, n) for label, calls in self._known.items() for n, call in calls.items() if not call.over
        ]

    def answers(self, asks: Iterable[Ask], here: RankStatus) -> list[dict[str, Any] | None]:
        """What this rank has called at each; None where it knows of nothing. here: where it stands."""
        self._look(frames=True)
        called = [self._known.get(label, {}).get(number) for label, number in asks]
        return [call and {"says": call.says, **vars(_called(call, here))} for call in called]


def _called(call: RecordedCollective, here: RankStatus) -> RankStatus:
    there = status_of(here.rank, [Frame(*frame) for frame in call.frames])
    part = "" if call.shown.startswith(there.part) else there.part
    return replace(
        here,
        state="called",
        part=part,
        op=call.shown,
        place=there.place or here.place,
        odd=there.odd + call.far,
    )


def _shown(call: RecordedCollective, here: RankStatus) -> GroupCall:
    called = _called(call, here)
    return GroupCall(call.says, call.over, called.part, called.op, called.place, called.odd)


def before_abort(hear: Callable[[], None]) -> Callable[[], None]:
    """Have `told` called, on a thread of Gloo's, where Gloo is about to abort this process since a message does not fit
    what it waits for; when it returns, the process is aborted. Returns what takes this back; nothing is done where C++
    has another library than GNU's."""
    act: Any = ctypes.CFUNCTYPE(None)
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        set_terminate, thrown = library._ZSt13set_terminatePFvvE, library.__cxa_current_exception_type
    except (OSError, AttributeError):
        return lambda: None
    set_terminate.restype = thrown.restype = ctypes.c_void_p
    set_terminate.argtypes = [ctypes.c_void_p]

    def terminated() -> None:
        kind = thrown()
        name = ctypes.c_char_p.from_address(kind + ctypes.sizeof(ctypes.c_void_p)).value if kind else b""
        if b"gloo" in (name or b""):
            hear()
        ctypes.cast(before, act)()

    mine = act(terminated)
    before = set_terminate(ctypes.cast(mine, ctypes.c_void_p))

    def take_back() -> None:
        set_terminate(before if mine else None)  # `mine` lives as long as this

    return take_back
