"""The collectives of one rank, call by call: when it was ready for each, when it wanted it, when it was over.

A sum makes all ranks equally slow, so times of steps say nothing of who was late. When each rank issued each call does.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

MOST = 64
"""Rows of a step that is written in full; of others at most a quarter."""
_SHARE, _ROW_S, _LEAST = (
    0.002,
    6e-6,
    4,
)  # of a step, what writing its rows may take; what one takes: benchmarks/sight.py
_HELD = 4096  # calls, the latest, where nobody takes them
_PHASES = {"forward": "forward", "backward": "backward", "optim": "optim", "sync": "optim"}


class LoggedCall:
    """One call, nanoseconds of the log's clock. issued_ns: this rank was ready. wanted_ns: from then on it waited.
    done_ns: it was seen to be over; 0 until then. number: of the calls of its axis and operation in the step, from 0,
    the same on all members of the group. nbytes: that this rank sends, as in the ledger."""

    __slots__ = (
        "axis",
        "clock",
        "done_ns",
        "issued_ns",
        "module",
        "nbytes",
        "number",
        "op",
        "phase",
        "wanted_ns",
    )

    def __init__(
        self, axis: str, op: str, nbytes: int, phase: str, module: str, number: int, clock: Callable[[], int]
    ) -> None:
        self.axis, self.op, self.nbytes, self.phase, self.module = axis, op, nbytes, phase, module
        self.number, self.clock = number, clock
        self.issued_ns = self.wanted_ns = clock()
        self.done_ns = 0

    def wants(self) -> None:
        """This rank has nothing else to do than wait for it."""
        self.wanted_ns = self.clock()

    def ends(self) -> None:
        """It is over."""
        self.done_ns = self.clock()


class CallLog:
    """Calls since the last `take`, the latest of very many. module: whose gradients the calls to come carry, "" where
    none is known. also: when set, gets every call besides: a profile does."""

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.module = ""
        self.also: list[LoggedCall] | None = None
        self._clock = clock
        self._calls: deque[LoggedCall] = deque(maxlen=_HELD)
        self._numbers: dict[tuple[str, str], int] = {}

    def begin(self, axis: str, op: str, nbytes: int, phase: str) -> LoggedCall:
        """This rank is ready for a call. phase: the kind of the span around it."""
        key = axis, op
        number = self._numbers.get(key, 0)
        self._numbers[key] = number + 1
        call = LoggedCall(axis, op, nbytes, _PHASES.get(phase, "other"), self.module, number, self._clock)
        self._calls.append(call)
        if self.also is not None:
            self.also.append(call)
        return call

    def take(self) -> list[LoggedCall]:
        """The calls that are over, in the order in which they began; those under way come with the next ones."""
        calls, self._numbers = list(self._calls), {}
        self._calls.clear()
        self._calls.extend([call for call in calls if not call.done_ns][-MOST:])
        return [call for call in calls if call.done_ns]


def affordable(seconds: float) -> int:
    """Rows of a step that took so long, where it is not written in full."""
    return max(_LEAST, min(MOST // 4, int(_SHARE * seconds / _ROW_S)))


def rows(calls: Sequence[LoggedCall], start_ns: int, most: int = MOST) -> tuple[list[list[Any]], int]:
    """What a line of events says of calls, and how many it leaves out. Each row is [axis, operation, bytes, phase,
    module, arrived, done, wanted, number], the three times in seconds since `start_ns`.

    Kept are calls of a kind that is rare in the step, the same ones on all ranks; then those that were waited for
    longest, and those before which this rank worked longest: where a rank is late, these are the same call on the
    others and on itself.
    """
    kept = calls if len(calls) <= most else _telling(calls, start_ns, most)
    at = lambda ns: round((ns - start_ns) * 1e-9, 6)
    said = [
        [c.axis, c.op, c.nbytes, c.phase, c.module, at(c.issued_ns), at(c.done_ns), at(c.wanted_ns), c.number]
        for c in kept
    ]
    return said, len(calls) - len(kept)


def _telling(calls: Sequence[LoggedCall], start_ns: int, most: int) -> list[LoggedCall]:
    kinds = Counter((call.axis, call.op) for call in calls)
    chosen: set[int] = set()
    for kind, count in sorted(kinds.items(), key=lambda pair: (pair[1], pair[0])):
        if len(chosen) + count <= most // 2:
            chosen |= {i for i, call in enumerate(calls) if (call.axis, call.op) == kind}
    waits = [call.done_ns - call.issued_ns for call in calls]
    ends = [start_ns, *(call.done_ns for call in calls[:-1])]
    works = [call.issued_ns - end for call, end in zip(calls, ends, strict=True)]
    longest = lambda values: sorted(range(len(calls)), key=values.__getitem__, reverse=True)
    for pair in zip(longest(waits), longest(works), strict=True):
        for at in pair:
            if len(chosen) < most:
                chosen.add(at)
    return [calls[i] for i in sorted(chosen)]
