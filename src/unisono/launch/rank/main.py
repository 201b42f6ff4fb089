"""What a forked child does: become a rank, run the entry function, report, leave. Imports torch: rank side only."""

import contextlib
import faulthandler
import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unisono.comm import begun, parting
from unisono.comm.device import built, count
from unisono.launch import crossing, transport
from unisono.launch.backend import Backend, Equipment, choose, has_mpi, settings, visible
from unisono.launch.context import RankContext, SocketChannel, flush_and_leave
from unisono.launch.malloc_tuning import keep_freed_memory, remember_few_collectives
from unisono.launch.pace import StepPace, margin
from unisono.launch.rank.store import SocketStore
from unisono.launch.rank.watchdog import Lookout
from unisono.launch.rank_status import PRINT
from unisono.launch.signals import TO_RANKS, at_once, meant
from unisono.spec.errors import UnisonoError
from unisono.spec.rendezvous import RankMeeting, Rendezvous

Entry = Callable[[RankContext, dict[str, Any], Any], dict[str, Any] | None]


@dataclass(frozen=True)
class SeatEnds:
    """A rank's own ends of its sockets, and its number. shelf: files in memory that outlive it."""

    rank: int
    store: int
    events: int
    output: int
    shelf: tuple[int, ...] = ()


def equipment() -> Equipment:
    """What this host has for its ranks."""
    return Equipment(count(), built(), has_mpi(), visible(os.environ))


def means(backend: Backend, route: transport.Route) -> str:
    """What ranks compute and talk with, and why, for the start of a run."""
    return f"backend {backend.name} ({backend.why}), transport {route.device or 'not known'} ({route.why})"


def live(
    seat: SeatEnds, order: dict[str, Any], entry: Entry, argument: dict[str, Any], share: Callable[[], Any]
) -> None:
    """The whole life of a rank; never returns. share(): what all ranks share, read before or now."""
    code = 1
    try:
        pace = StepPace(order["timeout"])
        channel = SocketChannel(socket.socket(fileno=seat.events), pace=pace)
        try:
            ctx, meetings = _placed(seat, order, channel, pace)
        except BaseException as error:  # nothing of the user's has run yet: still somebody has to say why
            channel.farewell("error", error=crossing.describe(error))
            return
        code = _play(ctx, channel, entry, argument, share)
        meetings.lookout.close()
    finally:
        flush_and_leave(code)


def _placed(
    seat: SeatEnds, order: dict[str, Any], channel: SocketChannel, pace: StepPace
) -> tuple[RankContext, "_Meetings"]:
    """What the entry function is told, in a process that is ready for it."""
    _hear_signals(channel)
    route = _settle_in(seat, order)
    os.environ.update(settings(order["backend"], socket.gethostname(), order["local_rank"]))
    backend = choose(order["backend"], max(order["local_world"], order["serves"] or 0), equipment())
    epoch = order["epoch"]
    limit = timedelta(seconds=margin(order["timeout"]))
    store = SocketStore(socket.socket(fileno=seat.store), limit, _keys(epoch))
    ctx = RankContext(
        rank=seat.rank,
        world=order["world"],
        local_rank=order["local_rank"],
        local_world=order["local_world"],
        host=socket.gethostname(),
        threads=order["threads"],
        backend=backend.name,
        store=store,
        channel=channel,
        run_token=order["token"],
        means=means(backend, route),
        epoch=epoch,
        rendezvous=Rendezvous(RankMeeting.of(order), store) if order["joins"] else None,
        shelf=seat.shelf,
    )
    if ctx.backend == "gloo":
        remember_few_collectives(os.environ)
    if seat.rank == 0 and backend.note:
        channel.send("note", text=backend.note)
    watch = partial(_watch, channel=channel, host=ctx.host, pace=pace)
    meetings = _Meetings(RankMeeting.of(order), store, watch)
    if order["recovers"]:
        channel.recover(epoch, meetings.away, meetings.anew)
    return replace(ctx, appear=partial(meetings.appear, ctx.run_token)), meetings


def _keys(epoch: int) -> str:
    """What keys in the store begin with in one epoch."""
    return f"epoch/{epoch}/" if epoch else ""


class _Meetings:
    """What a rank has anew each time that the ranks meet: the store, and the lookout, which speaks over it.

    watch(rank, world, epoch=, store=): makes a lookout. The thread that hears of losses calls `away`, the main one
    `anew`, never both at once (`SocketChannel.recover`).
    """

    def __init__(self, meeting: RankMeeting, store: SocketStore, watch: Callable[..., Lookout]) -> None:
        self.store, self.watch = store, watch
        self.lookout = self.looks(meeting)
        self._appears: tuple[str, Path] | None = None
        self._held, self._present, self._turns = list[socket.socket](), meeting.present, 0

    def looks(self, meeting: RankMeeting) -> Lookout:
        alone = meeting.rank >= meeting.world  # it leaves: nobody waits for it
        world = 1 if alone else meeting.world
        # Groups of a later meeting have the names of earlier ones: what is recorded of those is not to be compared.
        return self.watch(
            meeting.rank, world, epoch=meeting.epoch, store=self.store, since=begun.groups_made()
        )

    def appear(self, run: str, folder: Path) -> None:
        """As `Lookout.appear`, of the one of the time."""
        self._appears = run, folder
        self.lookout.appear(run, folder)

    def away(self) -> None:
        """Ranks meet anew: free whatever waits for others here. Called again until the main thread has come, which may
        have made connections meanwhile."""
        self._turns += 1
        if self._turns == 1:
            self.lookout.dismiss()
            self.store.end()
            for sock in self._held:  # of the meeting before: all have left that
                sock.close()
            self._held.clear()
        self._held += parting.cut()
        if self._turns > 1 and self._turns.bit_count() == 1:  # ever more seldom
            parting.hang_up(self._present)

    def anew(self, meeting: RankMeeting) -> SocketStore:
        """The store of a meeting, with a lookout over it."""
        self._held += parting.cut()  # again: some may have been made since
        parting.forget()
        self.store = self.store.anew(_keys(meeting.epoch))
        self._present, self._turns = meeting.present, 0
        _tell_environment(meeting)
        self.lookout = self.looks(meeting)
        if self._appears is not None:
            self.lookout.appear(*self._appears)
        return self.store


def _watch(rank: int, world: int, channel: SocketChannel, epoch: int, **parts: Any) -> Lookout:
    """A lookout of one meeting. One rank tells the supervisor of a hang, which ends them all."""

    def hung(error: UnisonoError, mine: bool, kill: Sequence[int]) -> None:
        if mine:
            channel.send("hang", error=crossing.describe(error), epoch=epoch)

    return Lookout(rank, world, ended=hung, **parts)


def _play(
    ctx: RankContext, channel: SocketChannel, entry: Entry, argument: dict[str, Any], share: Callable[[], Any]
) -> int:
    try:
        channel.send("start", pid=os.getpid(), backend=ctx.backend)
        result = entry(ctx, argument, share())
        json.dumps(result)  # a result that cannot cross is the entry's error, not the channel's
    except BaseException as error:  # SystemExit too: a rank that leaves early has failed
        record = crossing.describe(error)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        channel.farewell("error", error=record)
        return 1
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    channel.farewell("result", value=result)
    return 0


def _hear_signals(channel: SocketChannel) -> None:
    """A signal to one rank asks the whole run to stop, as one to the supervisor does: a scheduler sends it to whom it
    likes. A long step does not keep the others from hearing of it."""

    def heard(number: int) -> None:
        channel.asked = channel.asked or meant(number)
        channel.send("asked", how=meant(number))

    at_once(heard, TO_RANKS)


def _settle_in(seat: SeatEnds, order: dict[str, Any]) -> transport.Route:
    os.setpgid(0, 0)  # so that what the user's code starts can be taken down with it
    os.dup2(seat.output, 1)
    os.dup2(seat.output, 2)
    os.close(seat.output)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable(file=2)  # a segfault leaves its stack
    faulthandler.register(PRINT, file=2, all_threads=False)  # and so does a hang, when asked
    _tell_environment(RankMeeting.of(order))
    # On one host neither Gloo nor NCCL then listens where others could knock.
    one, leads = not order["leads"], transport.leading_to(order["leads"]) if order["leads"] else ()
    route = transport.choose(() if one else transport.transports(), leads, one, os.environ, order["leads"])
    os.environ.update(route.settings)
    torch.set_num_threads(order["threads"])
    keep_freed_memory(os.environ)
    return route


def _tell_environment(meeting: RankMeeting) -> None:
    """What a user's code may read, by torchrun's names."""
    os.environ.update(
        RANK=str(meeting.rank),
        WORLD_SIZE=str(meeting.world),
        LOCAL_RANK=str(meeting.local_rank),
        LOCAL_WORLD_SIZE=str(meeting.local_world),
    )
