"""Threads that run the calls of others. One more starts where all are busy, so that calls within calls go on."""

import queue
import threading
from collections.abc import Callable


class CallPool:
    """At most `most` threads, which begin with `enter()` and end with the process."""

    def __init__(self, most: int, enter: Callable[[], object]) -> None:
        self._most, self._enter = most, enter
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = self._busy = 0

    def submit(self, job: Callable[[], object]) -> None:
        """Run a job, which raises nothing."""
        with self._lock:
            self._busy += 1
            grows = self._busy > self._threads < self._most
            self._threads += grows
        self._jobs.put(job)
        if grows:
            threading.Thread(target=self._live, name="remote call", daemon=True).start()

    def close(self) -> None:
        """End the threads as soon as they are free."""
        for _ in range(self._threads):
            self._jobs.put(None)

    def _live(self) -> None:
        self._enter()
        while (job := self._jobs.get()) is not None:
            try:
                job()
            finally:
                del job  # and what it holds, before the next one comes
                with self._lock:
                    self._busy -= 1
