"""The life of a rank that our launcher has forked. Imports torch: rank side only."""

import contextlib
import faulthandler
import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from unisono.comm import begun
from unisono.launch import error_record, inspect_folder
from unisono.launch.context import RankContext, flush_and_leave
from unisono.launch.inspect_folder import RankProcess
from unisono.launch.pace import StepPace, margin
from unisono.launch.rank import body
from unisono.launch.rank.body import Entry
from unisono.launch.rank.channel import SocketChannel
from unisono.launch.rank.meetings import Meeting, keys
from unisono.launch.rank.store import SocketStore
from unisono.launch.rank.watchdog import Watchdog
from unisono.launch.rank_status import PRINT, catch_lines
from unisono.launch.run.membership import Role
from unisono.launch.signals import TO_RANKS, meant, watch_signals
from unisono.spec.errors import UnisonoError
from unisono.spec.rendezvous import RankMeeting

__all__ = ["SeatEnds", "live", "torch"]


@dataclass(frozen=True)
class SeatEnds:
    """A rank's own ends of its sockets, and its number. shelf: files in memory that outlive it."""

    rank: int
    store: int
    events: int
    output: int
    shelf: tuple[int, ...] = ()


def live(
    seat: SeatEnds, order: dict[str, Any], entry: Entry, argument: dict[str, Any], share: Callable[[], Any]
) -> None:
    """The whole life of a rank; never returns. share(): what all ranks share, read before or now."""
    code = 1
    try:
        code = body.live(_Forked(seat, order, entry, share), argument)
    finally:
        flush_and_leave(code)


class _Forked:
    """A forked rank's side. Its result is the exit status."""

    def __init__(self, seat: SeatEnds, order: dict[str, Any], entry: Entry, share: Callable[[], Any]) -> None:
        self.seat, self.order, self.entry, self.share = seat, order, entry, share
        self.pace = StepPace(order["timeout"])
        self.channel = SocketChannel(socket.socket(fileno=seat.events), pace=self.pace)
        self.host, self.lines = socket.gethostname(), -1
        self.watchdog: Watchdog | None = None
        self.is_watched_alone = False

    def enter(self) -> tuple[RankContext, Entry]:
        order, place = self.order, RankMeeting.of(self.order)
        self._hear_signals()
        _take_output(self.seat.output)
        ctx = body.enter(
            place, order["threads"], order["backend"], self.channel, self._store, leads=order["leads"],
            serves=order["serves"] or 0, joins=order["joins"], run_token=order["token"], shelf=self.seat.shelf,
            role=Role(order.get("role", Role.TRAINER)),
        )  # fmt: skip
        self.lines = catch_lines()
        self.channel.listen(Meeting(place, ctx.store, self._watch), order["recovers"], self._report)
        self.channel.send("start", pid=os.getpid(), backend=ctx.backend)
        return replace(ctx, appear=self._appear), self.entry

    def shared(self, ctx: RankContext) -> Any:
        return self.share()

    def ended(self, ctx: RankContext, result: Any) -> int:
        json.dumps(result)  # a result that cannot cross is the entry's error, not the channel's
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        self.channel.farewell("result", value=result)
        self._close()
        return 0

    def failed(self, ctx: RankContext | None, error: BaseException) -> int:
        record = error_record.describe(error)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        self.channel.farewell("error", error=record)
        self._close()
        return 1

    def _close(self) -> None:
        if self.watchdog is not None:
            self.watchdog.close()

    def _store(self) -> SocketStore:
        limit = timedelta(seconds=margin(self.order["timeout"]))
        return SocketStore(socket.socket(fileno=self.seat.store), limit, keys(self.order["epoch"]))

    def _watch(self, place: RankMeeting, store: SocketStore) -> Watchdog:
        """The watchdog of one meeting. One rank tells the supervisor of a hang, which ends them all."""

        def hung(error: UnisonoError, mine: bool, kill: Sequence[int]) -> None:
            if mine:
                self.channel.send("hang", error=error_record.describe(error), epoch=place.epoch)

        world = place.world if place.rank < place.world else 1  # one that leaves: nobody waits for it
        # Groups of a later meeting have the names of earlier ones: what is recorded of those is not to be compared.
        since = begun.groups_made()
        watchdog = Watchdog(place.rank, world, self.host, store, self.pace, hung, self.lines, since=since)
        if self.is_watched_alone:
            watchdog.watch_alone()
        self.watchdog = watchdog
        return watchdog

    def _appear(self, folder: Path) -> None:
        """The supervisor answers in this folder for all ranks. Where this rank is alone, it is watched from now on."""
        place, token = RankMeeting.of(self.order), self.order["token"]
        me = inspect_folder.this_process(place.rank, place.world, self.host, self.lines, token)
        self.channel.send("appear", folder=str(folder), living=asdict(me))
        self.is_watched_alone = True
        if self.watchdog is not None:
            self.watchdog.watch_alone()

    def _report(self, question: dict[str, Any]) -> dict[str, Any]:
        """What this rank says of itself, or of another of its host that does not answer."""
        if (about := RankProcess.of(question.get("about") or {})) is not None:
            return {"rank": about.rank, **asdict(inspect_folder.seen(about))}
        return asdict(self.watchdog.report()) if self.watchdog is not None else {}

    def _hear_signals(self) -> None:
        """A signal to one rank asks the whole run to stop, as one to the supervisor does: a scheduler sends it to whom
        it likes. A long step does not keep the others from hearing of it."""

        def heard(number: int) -> None:
            self.channel.stopping = self.channel.stopping or meant(number)
            self.channel.send("asked", how=meant(number))

        watch_signals(heard, TO_RANKS)


def _take_output(output: int) -> None:
    """What this process prints goes to the supervisor, and so do the lines of a fault or a hang."""
    os.setpgid(0, 0)  # so that what the user's code starts can be taken down with it
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable(file=2)  # a segfault leaves its stack
    faulthandler.register(PRINT, file=2, all_threads=False)  # and so does a hang, when asked
