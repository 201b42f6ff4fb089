"""The process that imports torch once and forks ranks from it: `python -m unisono.launch.helper`.

Forking is safe only from a process that has one thread, so this one imports, waits for orders, forks, and reports
deaths; it never computes. It dies with the supervisor (PR_SET_PDEATHSIG), and ranks die with it, so that even
`kill -9` leaves nobody behind. Imports torch inside `main`, after the death signal is set.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from unisono.launch import crossing, wire
from unisono.launch.entry import find
from unisono.launch.parent import die_with
from unisono.launch.signals import TO_RANKS


def threads_alive() -> int:
    return len(os.listdir("/proc/self/task"))


@dataclass
class _Order:
    """A run that was asked for: its terms, its argument, and the ends of the sockets of its ranks."""

    terms: dict[str, Any]
    argument: dict[str, Any]
    seats: list[list[int]] = field(default_factory=list)


class _Helper:
    def __init__(self, control: socket.socket, entry: str, libc: ctypes.CDLL) -> None:
        self._control = control
        self._libc = libc
        self._pid = os.getpid()
        self._children: dict[int, tuple[int, int]] = {}  # pidfd -> (pid, rank)
        self._order: _Order | None = None
        self._ran: tuple[_Order, Any] | None = None  # the run under way, and what its ranks share
        self._shelves: list[list[int]] = []  # two files in memory for each rank, which outlive it
        began = time.monotonic()
        self._rank = importlib.import_module("unisono.launch.rank")
        self._rank.torch.set_num_threads(1)  # OpenMP threads would not survive the fork
        self._module, self._entry = find(entry)
        self._say(op="imported", seconds=time.monotonic() - began, threads=threads_alive())

    def _say(self, fds: tuple[int, ...] = (), **message: Any) -> None:
        wire.send_message(self._control, message, fds)

    def serve(self) -> None:
        """Obey until the supervisor hangs up."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        watched: set[int] = set()
        while True:
            for fd in self._children.keys() - watched:
                poll.register(fd, select.POLLIN)
            watched = set(self._children)
            for fd, _ in poll.poll():
                if fd in self._children:
                    poll.unregister(fd)
                    watched.discard(fd)
                    self._bury(fd)
                elif not self._obey():
                    return

    def _bury(self, pidfd: int) -> None:
        pid, rank = self._children.pop(pidfd)
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        try:
            # Before the rank is reaped its number cannot be anyone else's: the moment to end what it started.
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(pidfd)
        self._say(op="exit", rank=rank, pid=pid, status=status)

    def _obey(self) -> bool:
        got = wire.read_message(self._control)
        if got is None:
            return False
        message, fds = got
        if message["op"] == "run":
            self._order = _Order(message, message.pop("argument"))
        elif message["op"] == "seat" and self._order is not None:
            self._order.seats.append(fds)
            if len(self._order.seats) == self._order.terms["ranks"]:
                order, self._order = self._order, None
                self._fork_all(order)
        elif message["op"] == "again" and self._ran is not None:
            order, shared = self._ran
            born = {key: message[key] for key in ("epoch", "joins")}
            again = _Order(order.terms | born, order.argument | message["settled"])
            self._fork({message["rank"]: fds}, again, shared)
        return True

    def _fork_all(self, order: _Order) -> None:
        try:
            prepare = getattr(self._module, "prepare", None)
            shared = prepare(order.argument) if prepare is not None else None
        except BaseException as error:  # the supervisor reports it
            self._say(op="failed", error=crossing.describe(error))
            _close(order.seats)
            return
        gc.collect()
        gc.freeze()  # the children share these pages; a collection would write to all of them
        _close(self._shelves)
        self._shelves = [_shelf() if order.terms["recovers"] else [] for _ in order.seats]
        self._fork(dict(enumerate(order.seats)), order, shared)
        gc.unfreeze()
        self._ran = (order, shared)
        self._say(op="forked", threads=threads_alive())

    def _fork(self, seats: dict[int, list[int]], order: _Order, shared: Any) -> None:
        """Ranks for these seats: the ends of the sockets of each, by its number."""
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in seats:
            pid = os.fork()
            if pid == 0:
                self._become(rank, seats, order, shared)
            pidfd = os.pidfd_open(pid)
            self._children[pidfd] = (pid, rank)
            self._say((pidfd,), op="born", rank=rank, pid=pid)
        _close(list(seats.values()))

    def _become(self, rank: int, seats: dict[int, list[int]], order: _Order, shared: Any) -> None:
        """In the child: keep our own sockets only, and never come back into the loop above."""
        try:
            die_with(self._pid, self._libc)
            self._control.close()
            for pidfd in self._children:
                os.close(pidfd)
            _close([seat for other, seat in seats.items() if other != rank])
            _close([shelf for other, shelf in enumerate(self._shelves) if other != rank])
            seat = self._rank.SeatEnds(rank, *seats[rank], shelf=tuple(self._shelves[rank]))
            self._rank.live(seat, order.terms, self._entry, order.argument, shared)
        finally:
            os._exit(1)


def _shelf() -> list[int]:
    """Empty files: a rank fills them, and gives them their size."""
    return [os.memfd_create(f"snapshot {number}", os.MFD_CLOEXEC) for number in range(2)]


def _close(seats: list[list[int]]) -> None:
    for seat in seats:
        for fd in seat:
            os.close(fd)


def main() -> None:
    terms = json.loads(sys.argv[1])
    libc = ctypes.CDLL(None, use_errno=True)
    die_with(terms["parent"], libc)
    # Blocked, not ignored: what comes to a rank before it has its handlers waits for them.
    signal.pthread_sigmask(signal.SIG_BLOCK, TO_RANKS)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    sys.path[:0] = terms["path"]
    control = socket.socket(fileno=terms["control"])
    try:
        helper = _Helper(control, terms["entry"], libc)
    except BaseException as error:  # the supervisor reports it
        wire.send_message(control, {"op": "failed", "error": crossing.describe(error)})
    else:
        with contextlib.suppress(OSError):  # the supervisor hung up while we spoke
            helper.serve()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
