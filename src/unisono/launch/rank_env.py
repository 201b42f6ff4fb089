"""The life of a rank that somebody else started, in its own process. Imports torch: rank side only."""

import ctypes
import json
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from unisono.launch import crossing, signals, transport
from unisono.launch.agree import agree
from unisono.launch.backend import choose, settings
from unisono.launch.context import Channel, Ending, PrintChannel, RankContext, flush_and_leave
from unisono.launch.entry import find
from unisono.launch.env import Started
from unisono.launch.heap import keep_freed_memory, remember_few_collectives
from unisono.launch.outcome import Outcome
from unisono.launch.pace import StepPace, margin
from unisono.launch.parent import die_with
from unisono.launch.rank import equipment, means
from unisono.launch.rank_calls import Ledger
from unisono.launch.rank_lookout import Lookout
from unisono.launch.run import verdict
from unisono.spec.errors import Stopped, UnisonoError, UsageError

_EARLY = 3600  # seconds
_LEAVE = 10.0
_ALIKE = 1.0
_AWAITED = "not all {} ranks were started, or the address or a firewall is wrong"
_ASKED = "asked to stop"
_ONE = 0.5  # seconds within which two interrupts are one Ctrl-C


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
    host = socket.gethostname()
    ending = replace(ending, leave=partial(_leave, place, ending.leave))
    channel = PrintChannel(place.rank, show, pace=StepPace(timeout), ending=ending)
    ctx = lookout = None
    _catch_signals(channel)
    try:
        module, function = find(entry)
        ctx = join(place, channel, threads, backend, timeout)
        lookout = watch(ctx, place, channel.pace, hung)
        ctx = replace(ctx, appear=partial(lookout.appear, ctx.run_token))
        keep_freed_memory(os.environ)
        prepare = getattr(module, "prepare", None)
        shared = agree(ctx, "prepared", lambda: prepare(argument)) if prepare is not None else None
        result = function(ctx, argument, shared)
        if channel.asked:
            ctx.store.set(_ASKED, channel.asked[0])
        _part()
        channel.over()
        how = _how(ctx, channel, result)
        if how:
            _tell_torchrun(place.error_file, crossing.describe(Stopped("stopped as asked")))
        lookout.close()
    except BaseException as error:  # whatever it is, it ends this rank and is reported
        if lookout is not None and lookout.condemned:
            time.sleep(_LEAVE)  # the lookout, which tells why, ends this process first
        record = crossing.describe(error)
        if (channel.draining or (channel.hurried() and record["echo"])) and ending.grace is not None:
            time.sleep(
                ending.grace
            )  # others have left as they were asked to, and so does this one, by its own clock
        _tell_torchrun(place.error_file, record)
        alike = _alike(ctx, record) if ctx is not None else [place.rank]
        others = [rank for rank in range(place.world) if rank not in alike]
        ours = verdict.judge(verdict.Failure(alike[0], record, host=host), alike, others)
        ours.shared |= not others  # rank 0 tells it
        return Outcome([None], ours, ours.exit)
    return Outcome([result], None, {"": 0, "interrupt": 130, "terminate": 75}[how], how)


def _alike(ctx: RankContext, record: crossing.Record) -> list[int]:
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
) -> Lookout:
    """A lookout whose verdict ends this process with 6. hung: tells the error; its second argument says whether this
    rank is the one to do so. ledger: what ranks have to do alike, besides collectives."""

    def ended(error: UnisonoError, mine: bool, kill: Sequence[int]) -> None:
        record = crossing.describe(error)
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

    return Lookout(ctx.rank, ctx.world, ctx.host, ctx.store.clone(), pace, ended, ledger)


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
    threads = threads or max(1, len(os.sched_getaffinity(0)) // place.local_world)
    torch.set_num_threads(threads)
    if place.source == "torchrun":  # one that is killed must not leave ranks behind
        die_with(os.getppid(), ctypes.CDLL(None))
    route = _route(place)
    store = _meet(place, timeout or 600.0)
    store.set_timeout(timedelta(seconds=margin(timeout)))
    os.environ.update(settings(backend, socket.gethostname(), place.local_rank))
    served = choose(backend, place.local_world, equipment())
    if served.name == "gloo":
        remember_few_collectives(os.environ)
    if place.rank == 0 and served.note:
        channel.send("note", text=served.note)
    if place.rank == 0:  # new at each start: no starter's own id is, and plain variables have none
        store.compare_set("run_token", "", secrets.token_hex(16))
    return RankContext(
        rank=place.rank,
        world=place.world,
        local_rank=place.local_rank,
        local_world=place.local_world,
        host=socket.gethostname(),
        threads=threads,
        backend=served.name,
        store=store,
        channel=channel,
        run_token=store.get("run_token").decode(),
        means=means(served, route),
    )


def _catch_signals(channel: PrintChannel) -> None:
    """The first signal is a request to stop. After a Ctrl-C the next one ends us, even inside a collective; but one
    Ctrl-C may come twice, from the terminal and from the starter that hands it on."""
    first = float("inf")

    def heard(number: int) -> None:
        nonlocal first
        how, now = signals.meant(number), time.monotonic()
        if how == "interrupt" and how in channel.asked:
            if now - first < _ONE:
                return
            flush_and_leave(130)
        first = now if how == "interrupt" else first
        channel.ask(how)

    if channel.ending.asked is not None:
        channel.ask("terminate", channel.ending.asked)
    signals.at_once(heard, signals.heard())


def _leave(place: Started, leave: Callable[[UnisonoError], None], error: UnisonoError) -> None:
    _tell_torchrun(place.error_file, crossing.describe(error))
    leave(error)


def _how(ctx: RankContext, channel: PrintChannel, result: Any) -> str:
    """How this rank, or else another one, was asked to stop; "" for a run that was not."""
    if channel.asked or not (isinstance(result, dict) and result.get("stopped")):
        return channel.asked[0] if channel.asked else ""
    with suppress(RuntimeError, OSError):  # whose store it was has gone
        return ctx.store.get(_ASKED).decode()
    return "terminate"


def _route(place: Started) -> transport.Route:
    """The device by which this rank meets the others, set for Gloo and NCCL where the user has not."""
    one_host = place.local_world == place.world
    leading = () if one_host else transport.leading_to(place.master)
    route = transport.choose(transport.transports(), leading, one_host, os.environ, place.master)
    os.environ.update(route.settings)
    return route


def _meet(place: Started, timeout: float) -> Store:
    """The store all ranks share, through torch's own rendezvous, which knows torchrun's. Raises UsageError (U-L01)."""
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.world),
        LOCAL_RANK=str(place.local_rank),
        LOCAL_WORLD_SIZE=str(place.local_world),
        MASTER_ADDR=place.master,
        MASTER_PORT=str(place.port),
    )
    address = f"{place.master}:{place.port}"
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
        raise UsageError(
            f"cannot meet the other ranks at {address}",
            where=f"MASTER_ADDR={place.master} MASTER_PORT={place.port}",
            likely=f"{transport.astray(place.master, place.rank == 0) or _AWAITED.format(place.world)}"
            f" ({words.splitlines()[0][:120] if words else type(error).__name__})",
            fix="start the others, or check that this host reaches that address",
            code="L01",
        ) from error
    return PrefixStore(f"unisono/{place.restart}", met[0])


def _part() -> None:
    """Leave together: a group destroyed while another rank still uses it aborts that rank."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _tell_torchrun(path: str, record: crossing.Record, early: bool = False) -> None:
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
