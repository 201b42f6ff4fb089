"""The life of a rank that torchrun, Slurm, MPI or plain variables started, in its own process. Imports torch: rank side
only."""

import ctypes
import json
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from unisono.launch import error_record, signals, transport
from unisono.launch.agree import agree
from unisono.launch.context import Channel, Ending, RankContext, flush_and_leave
from unisono.launch.entry import find
from unisono.launch.env import Started
from unisono.launch.outcome import Outcome
from unisono.launch.pace import StepPace, margin
from unisono.launch.parent import set_parent_death_signal
from unisono.launch.rank.body import Entry, enter, live
from unisono.launch.rank.calls import Ledger
from unisono.launch.rank.channel import PrintChannel
from unisono.launch.rank.watchdog import Watchdog
from unisono.launch.rank_status import catch_lines
from unisono.launch.run import verdict
from unisono.spec.errors import Stopped, UnisonoError, UsageError
from unisono.spec.rendezvous import RankMeeting

_EARLY = 3600  # seconds
_LEAVE = 10.0
_ALIKE = 1.0
_AWAITED = "not all {} ranks were started, or the address or a firewall is wrong"
_PREFIX = "unisono/{}"
_STOP_KEY = "asked to stop"
_ONE = 0.5  # seconds within which two interrupts are one Ctrl-C
_READING = "beside/reading"
_READ = 5.0  # seconds that rank 0 stays for those beside the ranks who still read its store


def run(
    place: Started,
    entry: str,
    argument: dict[str, Any],
    show: Callable[[int, dict[str, Any]], None] | None,
    threads: int | None,
    backend: str,
    timeout: float | None,
    hung: Callable[[UnisonoError, bool], None],
    ending: Ending,
) -> Outcome:
    """Meet the others, run `entry`, part in good order. See `env.run_in_env`."""
    ending = replace(ending, leave=partial(_leave, place, ending.leave))
    channel = PrintChannel(place.rank, show, pace=StepPace(timeout), ending=ending)
    _catch_signals(channel)
    meet = partial(join, place, channel, threads, backend, timeout)
    return live(_UnderStarter(place, entry, argument, channel, meet, hung), argument)


@dataclass
class _UnderStarter:
    """The side of a rank that somebody else started. meet(): its place among the others."""

    place: Started
    entry: str
    argument: dict[str, Any]
    channel: PrintChannel
    meet: Callable[[], RankContext]
    hung: Callable[[UnisonoError, bool], None]
    prepare: Callable[[dict[str, Any]], Any] | None = None
    watchdog: Watchdog | None = None

    def enter(self) -> tuple[RankContext, Entry]:
        module, function = find(self.entry)
        self.prepare = getattr(module, "prepare", None)
        ctx = self.meet()
        self.watchdog = watch(ctx, self.place, self.channel.pace, self.hung)
        return replace(ctx, appear=partial(self.watchdog.appear, ctx.run_token)), function

    def shared(self, ctx: RankContext) -> Any:
        prepare = self.prepare
        return None if prepare is None else agree(ctx, "prepared", lambda: prepare(self.argument))

    def ended(self, ctx: RankContext, result: Any) -> Outcome:
        if self.channel.stops:
            ctx.store.set(_STOP_KEY, self.channel.stops[0])
        _part()
        if ctx.rank == 0:
            _await_readers(ctx.store)
        self.channel.over()
        how = _how(ctx, self.channel, result)
        if how:
            _tell_torchrun(self.place.error_file, error_record.describe(Stopped("stopped as asked")))
        if self.watchdog is not None:
            self.watchdog.close()
        return Outcome([result], None, {"": 0, "interrupt": 130, "terminate": 75}[how], how)

    def failed(self, ctx: RankContext | None, error: BaseException) -> Outcome:
        if self.watchdog is not None and self.watchdog.condemned:
            time.sleep(_LEAVE)  # the watchdog, which tells why, ends this process first
        record, grace = error_record.describe(error), self.channel.ending.grace
        if (self.channel.draining or (self.channel.hurried() and record["echo"])) and grace is not None:
            time.sleep(
                grace
            )  # others have left as they were asked to, and so does this one, by its own clock
        _tell_torchrun(self.place.error_file, record)
        alike = _alike(ctx, record) if ctx is not None else [self.place.rank]
        others = [rank for rank in range(self.place.world) if rank not in alike]
        judged = verdict.judge(verdict.Failure(alike[0], record, host=socket.gethostname()), alike, others)
        judged.shared |= not others  # rank 0 tells it
        return Outcome([None], judged, judged.exit)


def _alike(ctx: RankContext, record: error_record.Record) -> list[int]:
    """The ranks that raise what this one does, as far as they do so within the next moment."""
    if record["echo"] or record["shared"]:
        return [ctx.rank]
    words, until = json.dumps([record["what"], record["where"]]).encode(), time.monotonic() + _ALIKE
    same = [ctx.rank]

    def posted(topic: str, value: bytes) -> list[str]:
        keys = [f"{topic}/{rank}" for rank in range(ctx.world)]
        ctx.store.set(keys[ctx.rank], value)
        while not ctx.store.check(keys) and time.monotonic() < until:
            time.sleep(0.02)
        return keys

    with suppress(RuntimeError, OSError):  # whose store it was has gone
        keys = posted("raised", words)
        same = [
            rank for rank, key in enumerate(keys) if ctx.store.check([key]) and ctx.store.get(key) == words
        ]
        posted("compared", b"")  # the store is one rank's, which stays until the others have read
    return same


def watch(
    ctx: RankContext,
    place: Started,
    pace: StepPace,
    hung: Callable[[UnisonoError, bool], None],
    ledger: Ledger | None = None,
) -> Watchdog:
    """A watchdog whose verdict ends this process with 6. hung: tells the error; its second argument says whether this
    rank is the one to do so. ledger: what ranks have to do alike, besides collectives."""

    def ended(error: UnisonoError, mine: bool, kill: Sequence[int]) -> None:
        record = error_record.describe(error)
        record["what"] = f"U-{error.code} {error.what}, rank {error.rank}; {error.where}"
        _tell_torchrun(place.error_file, record, early=error.rank == place.rank)
        try:
            hung(error, mine)
        finally:
            time.sleep(0.2)  # so that all have heard it before the first connection breaks
            for pid in kill:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            flush_and_leave(error.exit)

    return Watchdog(ctx.rank, ctx.world, ctx.host, ctx.store.clone(), pace, ended, catch_lines(), ledger)


def join(
    place: Started,
    channel: Channel,
    threads: int | None = None,
    backend: str = "auto",
    timeout: float | None = None,
) -> RankContext:
    """Meet the other ranks and share out the cores: this process's place as a rank knows it.

    `timeout` in seconds, for meeting the others. Raises UsageError (U-L01, U-L08).
    """
    if place.source == "torchrun":  # one that is killed must not leave ranks behind
        set_parent_death_signal(os.getppid(), ctypes.CDLL(None))
    threads = threads or max(1, len(os.sched_getaffinity(0)) // place.local_world)
    local = RankMeeting(0, place.rank, place.world, place.world, place.local_rank, place.local_world)
    leads = "" if place.local_world == place.world else place.master

    def met() -> Store:
        store = _meet(place, timeout or 600.0)
        store.set_timeout(timedelta(seconds=margin(timeout)))
        return store

    ctx = enter(local, threads, backend, channel, met, leads=leads, run_token="")
    if place.rank == 0:  # new at each start: no starter's own id is, and plain variables have none
        ctx.store.compare_set("run_token", "", secrets.token_hex(16))
    return replace(ctx, run_token=ctx.store.get("run_token").decode())


def stand_beside(place: Started, timeout: float | None = None) -> Store:
    """The store of the ranks, for a process that is none of them, or for one more use of it.

    timeout: seconds, for rank 0 to be there; ten minutes if None. Raises UsageError (U-L01)."""
    try:
        limit = timedelta(seconds=timeout or 600.0)
        store = dist.TCPStore(place.master, place.port, None, False, limit, wait_for_workers=False)
    except (dist.DistNetworkError, dist.DistStoreError, OSError) as error:
        raise _no_meeting(place, error) from error
    return PrefixStore(_PREFIX.format(place.restart), store)


@contextmanager
def reading(store: Store) -> Iterator[None]:
    """Inside it the store of `stand_beside` is kept a few seconds longer than the ranks need it: a run of seconds may
    be over before a process beside it has looked."""
    store.add(_READING, 1)
    try:
        yield
    finally:
        with suppress(RuntimeError, OSError):  # rank 0 has gone
            store.add(_READING, -1)


def _await_readers(store: Store) -> None:
    until = time.monotonic() + _READ
    while store.add(_READING, 0) > 0 and time.monotonic() < until:
        time.sleep(0.02)


def _catch_signals(channel: PrintChannel) -> None:
    """The first signal is a request to stop. After a Ctrl-C the next one ends us, even inside a collective; but one
    Ctrl-C may come twice, from the terminal and from the starter that hands it on."""
    first = float("inf")

    def heard(number: int) -> None:
        nonlocal first
        how, now = signals.meant(number), time.monotonic()
        if how == "interrupt" and how in channel.stops:
            if now - first < _ONE:
                return
            flush_and_leave(130)
        first = now if how == "interrupt" else first
        channel.ask(how)

    if channel.ending.asked_ago is not None:
        channel.ask("terminate", channel.ending.asked_ago)
    signals.watch_signals(heard, signals.heard())


def _leave(place: Started, leave: Callable[[UnisonoError], None], error: UnisonoError) -> None:
    _tell_torchrun(place.error_file, error_record.describe(error))
    leave(error)


def _how(ctx: RankContext, channel: PrintChannel, result: Any) -> str:
    """How this rank, or else another one, was asked to stop; "" for a run that was not."""
    if channel.stops or not (isinstance(result, dict) and result.get("stopped")):
        return channel.stops[0] if channel.stops else ""
    with suppress(RuntimeError, OSError):  # whose store it was has gone
        return ctx.store.get(_STOP_KEY).decode()
    return "terminate"


def _meet(place: Started, timeout: float) -> Store:
    """The store all ranks share, through torch's own rendezvous, which knows torchrun's. Raises UsageError (U-L01)."""
    os.environ.update(MASTER_ADDR=place.master, MASTER_PORT=str(place.port))
    try:
        met = next(iter(rendezvous("env://", place.rank, place.world, timeout=timedelta(seconds=timeout))))
    except (dist.DistNetworkError, dist.DistStoreError, OSError) as error:
        words = str(error)
        if "EADDRINUSE" in words or "address already in use" in words.lower():
            raise UsageError(
                f"port {place.port} is in use on this host",
                where=f"MASTER_PORT={place.port}",
                likely="another run, or one that has not ended yet",
                fix="another MASTER_PORT (torchrun: --master-port, or --standalone to have one chosen)",
                code="L01",
            ) from error
        raise _no_meeting(place, error) from error
    return PrefixStore(_PREFIX.format(place.restart), met[0])


def _no_meeting(place: Started, error: Exception) -> UsageError:
    words = str(error)
    return UsageError(
        f"cannot meet the other ranks at {place.master}:{place.port}",
        where=f"MASTER_ADDR={place.master} MASTER_PORT={place.port}",
        likely=f"{transport.astray(place.master, place.rank == 0) or _AWAITED.format(place.world)}"
        f" ({words.splitlines()[0][:120] if words else type(error).__name__})",
        fix="start the others, or check that this host reaches that address",
        code="L01",
    )


def _part() -> None:
    """Leave together: a group destroyed while another rank still uses it aborts that rank."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _tell_torchrun(path: str, record: error_record.Record, early: bool = False) -> None:
    """The error in torch's own shape, so that torchrun's summary shows it; of several it names the earliest."""
    if not path:
        return
    # One line, since the traceback stands above. torchrun calls the earliest the root cause, and its clock ticks in
    # seconds: an echo is later than what it echoes.
    info = {
        "py_callstack": record["where"],
        "timestamp": str(int(time.time()) + record["echo"] - _EARLY * early),
    }
    message = {"message": record["what"], "extraInfo": info}
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"message": message}))
