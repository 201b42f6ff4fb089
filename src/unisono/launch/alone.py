"""Whether a process has threads beside its first, which a fork would leave behind with all that they hold. No torch."""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

_TASKS = Path("/proc/self/task")
_LEAVING = 0.2
"""Seconds in which threads that were waited for may still be leaving the kernel."""


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
            with suppress(OSError):  # it has left
                names.append(python.get(task) or (_TASKS / task / "comm").read_text().strip())
    return sorted(names)
