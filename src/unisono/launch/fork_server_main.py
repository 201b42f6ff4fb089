"""The process that imports torch once and forks ranks from it: `python -m unisono.launch.fork_server_main`.

Forking is safe only from a process that has one thread, so this one imports, waits for orders, forks, and reports
deaths; it never computes. It dies with the supervisor (PR_SET_PDEATHSIG), and ranks die with it, so that even
`kill -9` leaves nobody behind. Imports torch inside `main`, after the death signal is set.

What all ranks share, such as the data, is read here once. Where reading it starts threads, as libraries with a pool of
them do, nothing can be forked any more: then this process becomes a new one, and each rank reads for itself.
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
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.launch import error_record, wire
from unisono.launch.entry import find
from unisono.launch.parent import set_parent_death_signal
from unisono.launch.signals import TO_RANKS
from unisono.spec.errors import UsageError

_TASKS = Path("/proc/self/task")
_LEAVING = 0.2
"""Seconds in which threads that were waited for may still be leaving the kernel."""


@dataclass
class _Order:
    """A run that was asked for: its terms, its argument, what gives a rank what all of them share, and two files in
    memory for each of them, which outlive it."""

    terms: dict[str, Any]
    argument: dict[str, Any]
    share: Callable[[], Any] = lambda: None
    shelves: list[list[int]] = field(default_factory=list)


class ForkServerProcess:
    """This process as a fork server. find_entry(): (module whose `prepare` reads what ranks share, entry function)."""

    def __init__(
        self,
        control: socket.socket,
        terms: dict[str, Any],
        libc: ctypes.CDLL,
        find_entry: Callable[[], tuple[Any, Any]],
    ) -> None:
        self._control, self._terms = control, terms
        self._libc = libc
        self._pid = os.getpid()
        self._children: dict[int, tuple[int, int]] = {}  # pidfd -> (pid, number of the worker)
        self._order: _Order | None = None
        began = time.monotonic()
        self._rank = importlib.import_module("unisono.launch.rank.main")
        self._rank.torch.set_num_threads(1)  # OpenMP threads would not survive the fork
        self._module, self._entry = find_entry()
        self._threads = thread_count()
        self._say(op="imported", seconds=time.monotonic() - began, threads=self._threads)
        if "order" in terms:
            self._ready(_Order(**_taken(terms["order"])), apart=True)

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
        pid, worker = self._children.pop(pidfd)
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        try:
            # Before the rank is reaped its number cannot be anyone else's: the moment to end what it started.
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(pidfd)
        self._say(op="exit", worker=worker, status=status)

    def _obey(self) -> bool:
        got = wire.read_message(self._control)
        if got is None:
            return False
        message, fds = got
        if message["op"] == "run":
            self._prepare(_Order(message, message.pop("argument")))
        elif message["op"] == "spawn" and self._order is not None:
            self._fork(message, fds, self._order)
        else:
            _close([fds])
        return True

    def _prepare(self, order: _Order) -> None:
        """What all ranks share, before the first is forked."""
        try:
            prepare = getattr(self._module, "prepare", None)
            shared = prepare(order.argument) if prepare is not None else None
            if names := threads_beyond(self._threads):
                self._become_anew(order, names)
            order.share = lambda: shared
        except BaseException as error:  # the supervisor reports it
            self._order = None
            self._say(op="failed", error=error_record.describe(error))
        else:
            self._ready(order)

    def _become_anew(self, order: _Order, names: list[str]) -> None:
        """This program from its beginning, in this process: without the threads, and with the order in hand."""
        self._say(
            op="note",
            text=f"reading the data started threads ({_first_names(names)}): each rank reads it for itself",
        )
        file = os.memfd_create("order")
        with os.fdopen(os.dup(file), "wb") as writer:
            writer.write(json.dumps({"terms": order.terms, "argument": order.argument}).encode())
        for kept in (file, self._control.fileno()):
            os.set_inheritable(kept, True)
        terms = json.dumps({**self._terms, "control": self._control.fileno(), "order": file})
        os.execv(sys.executable, [sys.executable, "-P", "-m", "unisono.launch.fork_server_main", terms])

    def _ready(self, order: _Order, apart: bool = False) -> None:
        """Ranks may be forked. apart: each reads for itself what ranks share."""
        if apart:
            order.share = lambda: self._module.prepare(order.argument)
        _close(self._order.shelves if self._order is not None else [])
        gc.unfreeze()
        gc.collect()
        gc.freeze()  # the children share these pages; a collection would write to all of them
        order.shelves = [_shelf() if order.terms["recovers"] else [] for _ in range(order.terms["room"])]
        self._order = order
        self._say(op="prepared")

    def _fork(self, message: dict[str, Any], ends: list[int], order: _Order) -> None:
        """A rank. ends: its own of its lines."""
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError as error:  # the system has no room for one more process
            record = error_record.describe(_unborn(message["rank"], error))
            self._say(op="failed", worker=message["worker"], error=record)
            _close([ends])
            return
        if pid == 0:
            self._become(message, ends, order)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = (pid, message["worker"])
        self._say((pidfd,), op="born", worker=message["worker"], pid=pid)
        _close([ends])

    def _become(self, message: dict[str, Any], ends: list[int], order: _Order) -> None:
        """In the child: keep our own files only, and never come back into the loop above."""
        try:
            set_parent_death_signal(self._pid, self._libc)
            self._control.close()
            for pidfd in self._children:
                os.close(pidfd)
            index = message["index"]
            _close([shelf for other, shelf in enumerate(order.shelves) if other != index])
            seat = self._rank.SeatEnds(message["rank"], *ends, shelf=tuple(order.shelves[index]))
            argument = order.argument | message.get("settled", {})
            self._rank.live(seat, order.terms | message, self._entry, argument, order.share)
        except BaseException:  # before it could say anything itself
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)


def _unborn(rank: int, error: OSError) -> UsageError:
    return UsageError(
        f"no process for rank {rank}: {error.strerror}",
        likely="a limit on processes or memory: ulimit -u, the pids or the memory of a container",
        fix="fewer ranks on this host, or a higher limit",
        rank=rank,
        code="L04",
    )


def _taken(file: int) -> dict[str, Any]:
    """What the process that this one was before has left in a file."""
    with os.fdopen(file, "rb") as reader:
        reader.seek(0)
        return json.loads(reader.read())


def _first_names(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _shelf() -> list[int]:
    """Empty files: a rank fills them, and gives them their size."""
    return [os.memfd_create(f"snapshot {number}", os.MFD_CLOEXEC) for number in range(2)]


def _close(seats: list[list[int]]) -> None:
    for seat in seats:
        for fd in seat:
            os.close(fd)


def thread_count() -> int:
    """All threads of this process, whoever started them."""
    return len(os.listdir(_TASKS))


def threads_beyond(count: int) -> list[str]:
    """The names of the threads beside the first, where there are more than `count` in all; [] where there are not.

    Python's threads have the names that Python knows; others those that the kernel knows, of up to 15 letters.
    """
    until = time.monotonic() + _LEAVING
    while thread_count() > count:
        if time.monotonic() > until:
            return _names()
        time.sleep(0.01)
    return []


def _names() -> list[str]:
    python = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    names = list[str]()
    for task in os.listdir(_TASKS):
        if task != str(os.getpid()):
            with contextlib.suppress(OSError):  # it has left
                names.append(python.get(task) or (_TASKS / task / "comm").read_text().strip())
    return sorted(names)


def main() -> None:
    terms = json.loads(sys.argv[1])
    libc = ctypes.CDLL(None, use_errno=True)
    set_parent_death_signal(terms["parent"], libc)
    # Blocked, not ignored: what comes to a rank before it has its handlers waits for them.
    signal.pthread_sigmask(signal.SIG_BLOCK, TO_RANKS)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    sys.path[:0] = terms["path"]
    control = socket.socket(fileno=terms["control"])
    try:
        server = ForkServerProcess(control, terms, libc, lambda: find(terms["entry"]))
    except BaseException as error:  # the supervisor reports it
        wire.send_message(control, {"op": "failed", "error": error_record.describe(error)})
    else:
        with contextlib.suppress(OSError):  # the supervisor hung up while we spoke
            server.serve()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
