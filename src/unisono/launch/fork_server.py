"""Ranks on this host, forked from one process that has imported torch. No torch here.

    with ForkServer("my.module:train") as server:
        outcome = server.run({"steps": 10}, ranks=4)

Four ranks are ready in the time of one import, several runs share it, no port is opened, and nothing outlives this
process: the fork server dies with it, and the ranks with the fork server (see `fork_server_main`).
"""

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TextIO

from unisono.launch.background_replanner import BackgroundReplanner
from unisono.launch.local_host import LocalHost
from unisono.launch.loop import EventLoop, OnEvent
from unisono.launch.outcome import Outcome
from unisono.launch.pace import StepPace
from unisono.launch.remote_hosts import RemoteHosts
from unisono.launch.run.membership import RunSpread
from unisono.launch.run.state import RunTerms, begin
from unisono.launch.signals import Signals
from unisono.launch.suspend import stops_with
from unisono.spec.errors import UsageError
from unisono.spec.settings import tell


class ForkServer:
    """Starts its process at once, so that its import runs beside whatever the caller does next.

    entry: names `function(ctx, argument, shared) -> dict | None`, which runs in every rank. If the same module has
    `prepare(argument)`, it runs there before the first fork, and its result is `shared`.
    path: folders that come first in the ranks' import path. start(): the host with its process, in the place of a new
    Python that imports `entry`.

    Make it in a thread that outlives it: Linux ends the process with that thread. Raises UsageError where the kernel
    lacks what this needs: then use torchrun.
    """

    def __init__(
        self, entry: str, path: Sequence[str] = (), start: Callable[[], LocalHost] | None = None
    ) -> None:
        if not hasattr(os, "pidfd_open"):
            raise UsageError(
                "starting ranks needs Linux 5.4 or newer",
                fix="start the same command with torchrun, which is recognised",
                code="L04",
            )
        self._start = start or partial(LocalHost.start, socket.gethostname(), 1, entry, path)
        self._host = self._start()
        self._count = 0  # workers of the runs so far

    @property
    def pid(self) -> int:
        """The fork server's process."""
        return self._host.server.pid

    def run(
        self,
        argument: dict[str, Any],
        ranks: int,
        threads: int | None = 1,
        on_event: OnEvent | None = None,
        timeout: float | None = None,
        backend: str = "auto",
        recovers: bool = False,
        grace: float | None = None,
        remote: RemoteHosts | None = None,
        replanner: BackgroundReplanner | None = None,
        spread: RunSpread | None = None,
        serves: int | None = None,
    ) -> Outcome:
        """Run the entry function in `ranks` forked processes and watch them to the end.

        `on_event(rank, event)` hears what ranks send, what they print (`kind="output"`), and as rank -1 the fork server
        and a request to stop. `timeout`: seconds that a rank may keep the others waiting; by the run's own steps if
        None (`pace`). recovers: ranks that are lost are replaced; else a lost rank ends the run. remote: other hosts,
        on which some of the ranks are. replanner: whom to ask for a better spread. serves: ranks for which a backend of
        `auto` is to do, if more than these: runs whose numbers are compared compute on one kind of device.
        Ctrl-C, SIGTERM and SIGUSR1 ask the ranks to stop; a second Ctrl-C kills them, and so do `grace` seconds after
        one of the others. Failures are in the Outcome.
        """
        if ranks < 1:
            raise UsageError(f"cannot start {ranks} ranks", fix="launch.ranks of 1 or more", code="L02")
        spread = spread or RunSpread("", ranks)
        pace, room = StepPace(timeout), remote.room if remote else max(ranks, len(spread.roles))
        choice = remote.choice if remote else None
        terms = RunTerms(self._host.name, spread, choice, recovers, grace, silence=pace.silence())
        order = {
            "backend": backend,
            "serves": serves,
            "token": secrets.token_hex(16),
            "timeout": timeout,
            "recovers": recovers,
        }
        state, hear = begin(terms, self._count), on_event or print_output
        self._host.room = room
        try:
            with Signals() as signals, stops_with(lambda: self.pid):
                if remote is not None:
                    remote.wait()
                loop = EventLoop(
                    state, hear, pace, order, argument, self._host, partial(self._start_anew, room), threads,
                    remote, replanner,
                )  # fmt: skip
                try:
                    return loop.run(signals)
                finally:
                    self._count = loop.state.count
        finally:
            if remote is not None:
                remote.close()
            if replanner is not None:
                replanner.close()

    def _start_anew(self, room: int) -> LocalHost:
        """Another process in the place of one that was killed, and its workers with it."""
        self._host.close()
        self._host = self._start()
        self._host.room = room
        return self._host

    def close(self) -> None:
        """End the process and with it all ranks; harmless when repeated."""
        self._host.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def start(entry: str, ranks: int, quiet: bool = False, stream: TextIO | None = None) -> ForkServer:
    """A fork server for `ranks` ranks of `entry`, importing torch from now on. Raises UsageError; see ForkServer.

    Says so at once: an import takes seconds, and silence looks like a hang.
    """
    server = ForkServer(entry)
    if not quiet:
        words = "1 process" if ranks == 1 else f"{ranks} processes"
        tell(f"starting {words} (importing torch) ...", stream)
    return server


def print_output(rank: int, event: dict[str, Any]) -> None:
    """What becomes of ranks' output and notes when nobody asked for it: standard error, with the rank in front."""
    if event["kind"] in ("output", "note"):
        tell(f"rank {rank} | {event['text']}")
