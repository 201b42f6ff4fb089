"""How long ranks may wait for one of them, by the run's own steps; and for how long a rank has slept. No torch."""

import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable

from unisono.launch.rank_status import process_state

FIRST = 300.0
"""Seconds before the pace is known: a first step compiles, reads and warms up."""
LEAST = 30.0
TIMES = 20
KNOWN = 3  # steps, from which on there is a pace
ASLEEP = 100.0
"""Seconds for which a rank may do nothing at all, where the user has set no deadline."""
PATIENCE = 10
"""How many deadlines a rank has that others wait for and that still computes: it may be validating alone."""


class StepPace:
    """The deadline of a wait: `timeout` seconds where the user has said so, else 20 of the run's steps and at least
    30 s, and five minutes before the first steps. Used by several threads."""

    def __init__(self, timeout: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout, self._clock = timeout, clock
        self._steps: deque[float] = deque(maxlen=64)
        self._last: tuple[int, float] | None = None
        self._first = 0

    def stepped(self, step: int) -> None:
        """So many steps are made by now."""
        now = self._clock()
        if self._last is not None and step > self._last[0]:
            self._steps.append((now - self._last[1]) / (step - self._last[0]))
        self._first = self._first if self._last is not None else step
        self._last = step, now

    @property
    def step(self) -> int:
        """Steps made."""
        return self._last[0] if self._last is not None else 0

    @property
    def since(self) -> float | None:
        """Seconds since the last step; None before the first."""
        return self._clock() - self._last[1] if self._last is not None else None

    @property
    def usual(self) -> float | None:
        """Seconds that a step takes; None as long as there is no pace."""
        steps = list(self._steps)
        return statistics.median(steps) if steps and self.step - self._first >= KNOWN else None

    def deadline(self) -> float:
        """Seconds that a rank may keep others waiting."""
        if self.timeout is not None:
            return self.timeout
        usual = self.usual
        return FIRST if usual is None else max(LEAST, TIMES * usual)

    def asleep(self) -> float:
        """Seconds for which a rank may do nothing at all, whether others wait for it or not."""
        return self.timeout if self.timeout is not None else ASLEEP

    def silence(self) -> float:
        """Seconds without a word of a rank, where no rank has said that it waits."""
        return self.deadline() * (PATIENCE if self.timeout is None else 2)


def margin(timeout: float | None) -> float:
    """Seconds for process groups and stores: their own time-out, which names nobody, is not to come first."""
    return max(7200.0, 20 * (timeout or 0.0))


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
