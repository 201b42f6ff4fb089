"""For how long a rank has done nothing: neither computed nor waited for a disk. No torch."""

import os
import time
from collections.abc import Hashable

from unisono.launch.rank_status import process_state

SHARE = 0.05
"""The share of a core that a rank uses at least while it computes. One that only wakes now and then uses less."""


class Sleep:
    """seconds: for how long this process has slept, as far as `look` has seen. by_line: its main thread turns in
    circles while it waits (for a GPU), so that only another line of it says that it goes on."""

    def __init__(self, by_line: bool) -> None:
        self.by_line, self.seconds = by_line, 0.0
        self._main = os.getpid()  # of the main thread, which a fork leaves unknown to Python
        self._far: Hashable = None
        self._used, self._looked, self._since = time.process_time(), time.monotonic(), time.monotonic()

    def look(self, now: float, far: Hashable, stopped: bool = False) -> None:
        """Look again. now: of the monotonic clock. far: how far the rank is. stopped: it was, by a signal, until now.
        One that waits for a core or for a disk does not sleep."""
        used = time.process_time()
        busy = not self.by_line and used - self._used >= SHARE * (now - self._looked)
        if far != self._far or stopped or busy or process_state(self._main) in ("R", "D"):
            self._since = now
        self._far, self._used, self._looked, self.seconds = far, used, now, now - self._since
