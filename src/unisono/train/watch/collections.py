"""Python's garbage collection between steps, rather than somewhere within one; and how long it took.

A collection within a step comes on each rank at another time, and all others wait for it in the next sum. Between steps
ranks collect together, after as many steps as they are asked to.
"""

import gc
import time
from collections.abc import Mapping
from typing import Any


class StepCollections:
    """Holds collections until `stepped`, from when it is made to `close`. every: steps from one to the next; 0 leaves
    them to Python. Their time is counted either way."""

    def __init__(self, every: int) -> None:
        self._every, self._seconds, self._began = every, 0.0, 0.0
        self._automatic = gc.isenabled()
        gc.callbacks.append(self._hears)
        if every:
            if not gc.get_freeze_count():  # ranks that a helper forked have what it imported frozen already
                gc.freeze()
            gc.disable()

    def stepped(self, step: int) -> float:
        """Step `step` is over: collect if it is time to. Seconds that collections took since the last call."""
        if self._every and step % self._every == 0:
            gc.collect()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def close(self) -> None:
        """Python collects as it did before."""
        gc.callbacks.remove(self._hears)
        if self._every and self._automatic:
            gc.enable()

    def _hears(self, phase: str, info: Mapping[str, Any]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._began = now
        else:
            self._seconds += now - self._began
