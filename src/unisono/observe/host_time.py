"""What the host did to the thread that trains: time with a core, time without one, garbage collection, pages read from
a disk; and what lies between two steps. Read once a step, in a few microseconds."""

import gc
import os
import time
from contextlib import suppress

_NAMES = ("cpu_s", "queue_s", "gc_s", "faults", "system_s")
_FIELDS = 3  # of schedstat: ns with a core, ns ready without one, turns


class HostMeter:
    """The numbers of one thread, from its creation in that thread on. `lap` returns those since the lap before.

    meter = HostMeter(); ...; meter.lap(0.2)    # {"cpu_s": 0.18, "queue_s": 0.004, "gc_s": 0.0, "faults": 0, ...}

    Linux tells all of them; elsewhere `queue_s`, `faults` and `system_s` are absent.
    """

    def __init__(self) -> None:
        self._file = -1
        with suppress(OSError):
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._collected_s = self._collecting = 0.0
        self._spent = {"save_s": 0.0, "eval_s": 0.0}
        self._ended: float | None = None
        gc.callbacks.append(self._collect)
        self._last = self._now()

    def close(self) -> None:
        """Let go of the file, and look at the garbage collector no more."""
        with suppress(ValueError):
            gc.callbacks.remove(self._collect)
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def spent(self, on: str, seconds: float) -> None:
        """Training stood still for this: `save_s` or `eval_s`."""
        self._spent[on] += seconds

    def begin(self) -> None:
        """A step begins: what the thread did between two of them is not its own, but for garbage collection."""
        cpu, queue, _, faults, kernel = self._now()
        self._last = cpu, queue, self._last[2], faults, kernel

    def lap(self, step_s: float) -> dict[str, float]:
        """A step of so many seconds has just ended: its numbers, and what lay between it and the step before it
        (`between_s`, of which `save_s` and `eval_s`; absent for the first)."""
        now, ended = self._now(), time.perf_counter()
        names = _NAMES if self._file >= 0 else ("cpu_s", "", "gc_s", "", "")
        said = {
            name: round(new - old, 6) for name, new, old in zip(names, now, self._last, strict=True) if name
        }
        if self._ended is not None:
            said["between_s"] = round(max(0.0, ended - step_s - self._ended), 6)
        said |= {name: round(seconds, 6) for name, seconds in self._spent.items() if seconds}
        self._last, self._ended, self._spent = now, ended, dict.fromkeys(self._spent, 0.0)
        return said

    def _now(self) -> tuple[float, float, float, float, float]:
        if self._file < 0:
            return time.thread_time(), 0.0, self._collected_s, 0.0, 0.0
        cpu, queue, *_ = map(int, os.pread(self._file, 96, 0).split()[:_FIELDS])
        return cpu * 1e-9, queue * 1e-9, self._collected_s, *_faults()

    def _collect(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = time.perf_counter()
        else:
            self._collected_s += time.perf_counter() - self._collecting


def _faults() -> tuple[float, float]:
    """(pages that this thread had read from a disk so far, seconds that the system worked for it)."""
    import resource

    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return float(usage.ru_majflt), usage.ru_stime
