"""Heartbeats on a thread, so that a peer whose steps are slow does not look dead."""

import threading

from unisono.spec.errors import UsageError
from unisono_contrib.comm.mailbox import Mailbox


class Heartbeats:
    """Beats from now until `close`."""

    def __init__(self, box: Mailbox) -> None:
        self._box, self._over = box, threading.Event()
        self._error: UsageError | None = None
        self._thread = threading.Thread(target=self._beat, name="unisono-heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._over.wait(self._box.alive_s / 4):
            try:
                self._box.beat()
            except UsageError as error:
                self._error = error
                return
            except Exception:  # each store has its own; the next beat may reach it
                continue

    def check(self) -> None:
        """Raises UsageError (L05) where another process has taken this peer's name."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """No more beats; one that is being written is waited for."""
        self._over.set()
        self._thread.join(5.0)
