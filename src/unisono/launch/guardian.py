"""The process that the user started, which only waits: another one, its child, is the supervisor. No torch.

A supervisor that is killed takes its ranks with it. The guardian then starts another one, which goes on with the run
folder. It learns of the folder, and of how far the run is, through a pipe. Killed itself, it leaves nobody behind: the
supervisor dies with it.

The supervisor has a process group of its own, so that what a terminal sends to the guardian's (Ctrl-C) comes to it
once, from here, as does what somebody sends to the guardian alone.
"""

import contextlib
import ctypes
import json
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, final

from unisono.launch.parent import set_parent_death_signal
from unisono.launch.run.membership import LIMIT, Tries
from unisono.launch.run.verdict import how_died
from unisono.launch.signals import Signals, heard, meant
from unisono.launch.suspend import stops_with
from unisono.spec.errors import Interrupted, Stopped, UserCodeError

SHOW_CURSOR = "\x1b[?25h"
"""What a live table has hidden, and a killed process does not bring back."""


@dataclass
class RunHistory:
    """What is known of a run when a supervisor begins. launches: supervisors before it. run_dir: "" if there is none.
    created: this command made it. began: its ranks have trained. saved: a checkpoint was. lost: how often ranks were
    lost and replaced. died, at: how the last supervisor ended, and when in Unix time; since: the same moment of the
    monotonic clock."""

    launches: int = 0
    run_dir: str = ""
    created: bool = False
    began: bool = False
    saved: bool = False
    lost: int = 0
    died: str = ""
    at: float = 0.0
    since: float = 0.0


@final
@dataclass
class GuardianPipe:
    """What a supervisor has of its guardian: the history of the run, and a pipe; None where there is no guardian."""

    history: RunHistory = field(default_factory=RunHistory)
    pipe: int | None = None

    def tell(self, **facts: Any) -> None:
        """Tell the guardian some fields of `RunHistory`, or the latest `step`. A guardian that does not listen (it is
        stopped) is not waited for."""
        if self.pipe is not None:
            with contextlib.suppress(OSError):
                os.write(self.pipe, json.dumps(facts).encode() + b"\n")


def may_guard() -> bool:
    """Whether this process may be forked: it has one thread, and the kernel says how its child ends."""
    alone = threading.current_thread() is threading.main_thread() and threading.active_count() == 1
    return alone and hasattr(os, "pidfd_open")


def guarded(note: Callable[[str], None]) -> GuardianPipe:
    """Returns in a new process, a supervisor; and in another one, if that is killed. This one never returns: it leaves
    with the supervisor's exit code, or raises when the run is given up. Call it while there is one thread."""
    return _Guardian(note).guard()


@final
class _Guardian:
    def __init__(self, note: Callable[[str], None]) -> None:
        self._note, self._known, self._tries = note, RunHistory(), Tries()
        self._signal = 0  # the first that asked the run to end
        self._child = 0
        self._heard = b""

    def guard(self) -> GuardianPipe:
        numbers = heard()
        while True:
            sys.stdout.flush()
            sys.stderr.flush()
            me, (ours, theirs) = os.getpid(), os.pipe()
            os.set_blocking(theirs, False)
            signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # what comes now waits for whoever hears it
            self._child = os.fork()
            if self._child == 0:
                os.close(ours)
                return _supervised(me, self._known, theirs, numbers)
            os.close(theirs)
            os.set_blocking(ours, False)
            with contextlib.suppress(OSError):
                os.setpgid(self._child, self._child)  # both do it: neither knows who is first
            with Signals() as signals:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
                status = self._wait(signals, ours)
                signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
            os.close(ours)
            if status >= 0:
                os._exit(status)  # nothing of this process's own is left to do or to tell
            self._mourn(status)

    def _wait(self, signals: Signals, pipe: int) -> int:
        """The supervisor's exit status, once it has ended."""
        gone = os.pidfd_open(self._child)
        try:
            # The supervisor, in a group of its own, would not hear of a Ctrl-Z.
            with stops_with(lambda: self._child), selectors.DefaultSelector() as selector:
                for fd in (gone, pipe, signals.fileno()):
                    selector.register(fd, selectors.EVENT_READ)
                while True:
                    ready = {key.fd for key, _ in selector.select()}
                    if pipe in ready and not self._hear(pipe):
                        selector.unregister(pipe)
                    for number in signals.take():
                        self._signal = self._signal or number
                        os.kill(self._child, number)
                    if gone in ready:
                        while self._hear(pipe):  # its last words
                            pass
                        return os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
        finally:
            os.close(gone)

    def _hear(self, pipe: int) -> bool:
        """Take in some of what the supervisor tells; False when it will tell no more."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(pipe, 1 << 16)
        *lines, self._heard = (self._heard + data).split(b"\n")
        for line in lines:
            for name, value in json.loads(line).items():
                if name == "step":
                    self._tries = self._tries.stepped(value)
                elif name == "lost":
                    self._known.lost += value
                else:
                    setattr(self._known, name, value)
        return bool(data)

    def _mourn(self, status: int) -> None:
        """A supervisor was killed. Raises where no other is to follow."""
        known, how = self._known, how_died(status)
        if sys.stderr.isatty():
            sys.stderr.write(SHOW_CURSOR)
        known.launches, known.died, known.at, known.since = (
            known.launches + 1, how, time.time(), time.monotonic(),
        )  # fmt: skip
        self._heard = b""
        if self._signal:
            self._unblock()
            kind = Interrupted if meant(self._signal) == "interrupt" else Stopped
            error: Exception = kind(f"the supervisor was {how} while the run was stopping")
        elif not self._tries.may():
            self._unblock()
            error = UserCodeError(
                f"the supervisor was {how}, {LIMIT + 1} times without a new step between",
                likely="the kernel ran out of memory (dmesg says so), or somebody killed it",
                code="R02",
            )
            error.__dict__["exit"] = 128 - status
        else:
            self._tries = self._tries.lost(())
            where = f"with {known.run_dir}" if known.run_dir else "from the beginning"
            self._note(f"note  the supervisor was {how}: another one goes on {where}")
            return
        if known.run_dir and known.began:
            error.run_dir = known.run_dir  # type: ignore[attr-defined]
        raise error

    def _unblock(self) -> None:
        """There is nobody any more to tell: what waits, and what comes later, changes nothing."""
        for number in heard():
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, heard())


def _supervised(guardian: int, known: RunHistory, pipe: int, numbers: list[signal.Signals]) -> GuardianPipe:
    """In the child, with the handlers that the guardian had before it was one."""
    set_parent_death_signal(guardian, ctypes.CDLL(None, use_errno=True))
    os.setpgid(0, 0)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # what it writes to the terminal is no background job's
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    return GuardianPipe(RunHistory(**asdict(known)), pipe)
