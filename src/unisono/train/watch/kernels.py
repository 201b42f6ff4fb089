"""A step looked at operation by operation: how much of it lies inside operations, between them, and in tiny ones.

Torch's recorder of operations is on during steps 4, 8, 16, ... of a start, so all ranks look at the same ones. It is
the older of torch's two, which costs a microsecond an operation and writes nothing to the screen.
"""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch._C import _autograd
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

TINY_US = 60.0
"""An operation that takes less is mostly its own start."""
FIRST = 4
_DEAREST = 5
_SENT = ("c10d::", "gloo:")  # collectives: the thread waits in them, without a core
_ODD, _SLICE_US = 4.0, 200.0


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

    def take(self) -> dict[str, Any]:
        """What was seen in the step that has just ended; {} if it was not looked at."""
        seen, self._seen = self._seen, {}
        return seen


def _begin() -> bool:
    """Start torch's recorder; False where another is on, or where this torch has none."""
    try:
        config = ProfilerConfig(ProfilerState.CPU, False, False, False, False, False, _ExperimentalConfig())
        _autograd._enable_profiler_legacy(config)
    except (RuntimeError, AttributeError, TypeError):
        return False
    return True


def _summed(threads: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Of the outermost operations of the thread that has most of them: how many, their seconds, those between them,
    those of tiny ones, the `dearest` by name, and `gap`: after which, before which, and for how many seconds there was
    none for longest, all such gaps together."""
    events: Sequence[Any] = max(threads, key=len, default=[])
    depth, began, ended, name, before = 0, 0.0, 0.0, "", ""
    spent: dict[str, list[float]] = {}
    gaps: dict[tuple[str, str], float] = {}
    for event in events:
        kind = event.kind()
        if kind == "push":
            if not depth:
                began, name = events[0].cpu_elapsed_us(event), event.name()
                if spent:
                    gaps[before, name] = gaps.get((before, name), 0.0) + began - ended
            depth += 1
        elif kind == "pop" and depth:
            depth -= 1
            if not depth:
                ended, before = events[0].cpu_elapsed_us(event), name
                spent.setdefault(name, []).append(ended - began)
    if not spent:
        return {}
    dearest = sorted(
        ((sum(_undisturbed(mine)), len(mine), name) for name, mine in spent.items()), reverse=True
    )
    clean = [us for name, mine in spent.items() if not name.startswith(_SENT) for us in _undisturbed(mine)]
    small = [us for us in clean if us < TINY_US]
    gap = max(gaps, key=gaps.__getitem__, default=("", ""))
    return {
        "count": len(clean),
        "inside_s": round(sum(clean) * 1e-6, 6),
        "outside_s": round(sum(gaps.values()) * 1e-6, 6),
        "small_s": round(sum(small) * 1e-6, 6),
        "small_count": len(small),
        "dearest": [[name, count, round(us * 1e-6, 6)] for us, count, name in dearest[:_DEAREST]],
        "gap": [*gap, round(gaps.get(gap, 0.0) * 1e-6, 6)],
    }


def _undisturbed(spent: Sequence[float]) -> Sequence[float]:
    """Microseconds of operations of one name without those in which the thread had lost its core, as far as many times
    the usual one tells."""
    most = _ODD * statistics.median(spent) + _SLICE_US
    return [min(us, most) for us in spent]
