"""Which line of Python a thread stands on, looked at a few hundred times a second."""

import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import FrameType

import torch

PERIOD = 0.005  # seconds; the interpreter changes threads as often
_FOREIGN = (str(Path(torch.__file__).parent), sysconfig.get_paths()["stdlib"])


class LineSampler(threading.Thread):
    """Counts seconds by line on the thread that makes it, from `start` to `stop`. A line is the innermost one outside
    torch and Python's own library; what they do counts for who called them."""

    def __init__(self, period: float = PERIOD) -> None:
        super().__init__(name="unisono line sampler", daemon=True)
        self._period, self._thread = period, threading.get_ident()
        self._over = threading.Event()
        self._seconds: dict[tuple[str, int, str], float] = {}
        self.seconds = 0.0

    def run(self) -> None:
        last = time.perf_counter()
        while not self._over.wait(self._period):
            key, now = self._line(), time.perf_counter()
            # A thread that was put aside for long knows where the other stands now, and not where it stood meanwhile.
            spent, last = min(now - last, 10 * self._period), now
            if key is not None:
                self._seconds[key] = self._seconds.get(key, 0.0) + spent
                self.seconds += spent

    def _line(self) -> tuple[str, int, str] | None:
        """No frame outlives this call: what it holds would be freed later, and on this thread."""
        frame = sys._current_frames().get(self._thread)
        return None if frame is None else _line_of(frame)

    def stop(self) -> None:
        """Returns when the thread is over."""
        self._over.set()
        if self.is_alive():
            self.join()

    def table(self, most: int = 200) -> list[tuple[str, int, str, float]]:
        """(file, line, function, seconds), the dearest first."""
        dearest = sorted(self._seconds.items(), key=lambda item: -item[1])[:most]
        return [(*key, seconds) for key, seconds in dearest]


def _line_of(frame: FrameType) -> tuple[str, int, str]:
    at: FrameType | None = frame
    while at is not None:
        code = at.f_code
        if not code.co_filename.startswith((*_FOREIGN, "<")) or "site-packages/unisono" in code.co_filename:
            return code.co_filename, at.f_lineno, code.co_qualname
        at = at.f_back
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname
