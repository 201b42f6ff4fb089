"""Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP, heard between other things by an event loop, or at once by a thread. No torch.

SIGUSR1 is what Slurm sends ahead of a time limit where it is asked to (`--signal=USR1@60`); it means what SIGTERM does.
"""

import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Collection, Container, Iterable
from types import FrameType, TracebackType
from typing import Self

from unisono.spec.errors import Stopped

TO_RANKS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""The signals that a scheduler may send to single ranks. SIGHUP is sent by a terminal, and that is the supervisor's."""


_LOADER = "/torch/utils/data/"


def heard() -> list[signal.Signals]:
    """The signals that ask a run to stop. SIGHUP (the terminal has gone) only if nobody ignores it, as `nohup` does."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [*TO_RANKS] + ([] if ignored else [signal.SIGHUP])


def meant(number: int) -> str:
    """ "interrupt" for Ctrl-C, "terminate" for the others."""
    return "interrupt" if number == signal.SIGINT else "terminate"


def watch_signals(hear: Callable[[int], None], numbers: Iterable[int]) -> None:
    """From now on `hear(number)` is called for each of these, by a thread that does nothing else: also while the main
    thread, which calls this, computes or waits for other ranks inside one long call. They may have been blocked.

    A process that this one forks has no part in it: each of these ends it, as any other process. Only the workers of a
    loader outlive what asks a whole job to stop: the step under way may need them, and they end with this process.
    """
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    known = set(numbers)

    def listen() -> None:
        while data := ours.recv(64):
            for number in data:
                if number in known:
                    hear(number)

    thread = threading.Thread(target=listen, name="unisono-signals", daemon=True)
    thread.start()
    signal.set_wakeup_fd(theirs.detach(), warn_on_full_buffer=False)
    ignored = {number for number in known if signal.signal(number, _noted) is signal.SIG_IGN}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, known)
    _part_at_fork(known, ignored)


def _part_at_fork(numbers: Collection[int], ignored: Container[int]) -> None:
    """From now on who is forked has these signals to itself. What comes while it is forked waits until then."""
    masks = dict[int, Iterable[int]]()  # of threads that fork just now

    def block() -> None:
        masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop(threading.get_ident()))

    def begin() -> None:
        signal.set_wakeup_fd(-1)
        loads = _LOADER in "".join(frame.f_code.co_filename for frame, _ in traceback.walk_stack(None))
        for number in numbers:
            # By SIGTERM the loader ends them.
            outlives = number in ignored or (loads and number != signal.SIGTERM)
            if signal.getsignal(number) is _noted:
                signal.signal(number, signal.SIG_IGN if outlives else signal.SIG_DFL)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=begin)


class StartupSignals:
    """A context manager around a command: SIGTERM and its like while nobody else hears them, before the ranks are there
    and after they have gone. The first ends the command by Stopped (75), and later ones change nothing.

    keeps: only remember that it came, since this process is a rank that others wait for. how: "terminate" once one has
    come, at `since`, a time of the monotonic clock. Outside the main thread nothing is heard.
    """

    def __init__(self, keeps: bool = False) -> None:
        self.keeps, self.how, self.since = keeps, "", 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in heard():
                if number != signal.SIGINT:
                    self._before[number] = signal.signal(number, self._came)
        return self

    def _came(self, number: int, frame: FrameType | None) -> None:
        first = not self.how
        self.stopping()
        if first and not self.keeps:
            raise Stopped("stopped as asked")

    def stopping(self) -> None:
        """The run is ending because it was asked to: to ask again changes nothing, whoever hears it."""
        self.since = self.since or time.monotonic()
        self.how = "terminate"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # What asked for the end may be sent to each process of a job: it must not change the exit code at the last.
            signal.signal(number, signal.SIG_IGN if self.how else handler)  # type: ignore[arg-type]


class Signals:
    """While open, those of `heard` arrive as their numbers from `take()`, and `fileno()` becomes readable.

    Outside the main thread (notebooks, tests) Python allows no handlers: then nothing is caught and nothing changes.
    """

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._theirs.setblocking(False)
        self._before: dict[int, object] = {}
        self._wakeup = -1

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._wakeup = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
            for number in heard():
                self._before[number] = signal.signal(number, _noted)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if self._before:
            signal.set_wakeup_fd(self._wakeup)
        self._ours.close()
        self._theirs.close()

    def fileno(self) -> int:
        return self._ours.fileno()

    def take(self) -> list[int]:
        """The signals that came since the last call, in order."""
        try:
            return [number for number in self._ours.recv(64) if number in self._before]
        except BlockingIOError:
            return []


def _noted(number: int, frame: FrameType | None) -> None:
    """The wake-up socket carries the news; a handler must exist for Python to write to it."""
