"""A step looked at operation by operation: how much of it lies inside operations, between them, and in tiny ones.

Torch's recorder of operations is on during steps 4, 8, 16, ... of a start, so all ranks look at the same ones. It is the
older of torch's two, which costs a microsecond an operation and writes nothing to the screen.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch._C import _autograd
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

TINY_US = 25.0
"""An operation that takes less is mostly its own start."""
FIRST = 4


class KernelLook:
    """Looks at a few steps of one rank. on: False on devices where operations are only handed over."""

    def __init__(self, on: bool) -> None:
        self._on, self._steps = on, 0
        self._seen: dict[str, Any] = {}

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one step."""
        self._steps += 1
        if not self._on or self._steps < FIRST or self._steps & (self._steps - 1) or not _begin():
            yield
            return
        try:
            yield
        finally:
            with suppress(RuntimeError):  # who else looks has ended it
                self._seen = _summed(_autograd._disable_profiler_legacy())

    def take(self, work_s: float) -> dict[str, Any]:
        """What was seen in the step that has just ended; {} if it was not looked at. work_s: its seconds, less those in
        which it waited."""
        seen, self._seen = self._seen, {}
        return {**seen, "python_s": round(max(0.0, work_s - seen["inside_s"]), 6)} if seen else {}


def _begin() -> bool:
    """Start torch's recorder; False where another is on, or where this torch has none."""
    try:
        config = ProfilerConfig(ProfilerState.CPU, False, False, False, False, False, _ExperimentalConfig())
        _autograd._enable_profiler_legacy(config)
    except (RuntimeError, AttributeError, TypeError):
        return False
    return True


def _summed(threads: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Of the outermost operations of the thread that has most of them; `gap`: after which, before which, and for how
    many seconds it did nothing else for longest, all such gaps together."""
    events = max(threads, key=len, default=())
    inside, count, small, small_count, depth = 0.0, 0, 0.0, 0, 0
    began, ended, name, before = 0.0, 0.0, "", ""
    gaps: dict[tuple[str, str], float] = {}
    for event in events:
        kind = event.kind()
        if kind == "push":
            if not depth:
                began, name = events[0].cpu_elapsed_us(event), event.name()
                if count:
                    gaps[before, name] = gaps.get((before, name), 0.0) + began - ended
            depth += 1
        elif kind == "pop" and depth:
            depth -= 1
            if not depth:
                ended, before = events[0].cpu_elapsed_us(event), name
                spent, count = ended - began, count + 1
                inside += spent
                if spent < TINY_US:
                    small, small_count = small + spent, small_count + 1
    if not count:
        return {}
    gap = max(gaps, key=gaps.__getitem__, default=("", ""))
    return {
        "count": count,
        "inside_s": round(inside * 1e-6, 6),
        "small_s": round(small * 1e-6, 6),
        "small_count": small_count,
        "gap": [*gap, round(gaps.get(gap, 0.0) * 1e-6, 6)],
    }
