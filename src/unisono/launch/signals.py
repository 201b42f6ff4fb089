"""Ctrl-C, SIGTERM and SIGHUP as bytes on a socket, so that one event loop hears them between other things. No torch."""

import signal
import socket
import threading
from types import FrameType, TracebackType
from typing import Self


def heard() -> list[signal.Signals]:
    """The signals that ask a run to stop. SIGHUP (the terminal has gone) only if nobody ignores it, as `nohup` does."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM] + ([] if ignored else [signal.SIGHUP])


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
