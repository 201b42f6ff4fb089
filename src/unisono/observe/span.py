"""Spans: what a rank was doing from when to when, cheap enough to stay switched on.

Totals are always kept, single spans only while `keep` is set. A span's total counts the time that is its *own*: an
exposed wait inside a backward is the wait's, not the backward's, so the totals of a step add up to its wall time.
Communication that ran beside compute (`exposed=False`) is a time of its own and is taken from nobody.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from unisono.observe.calls import CallLog, LoggedCall
from unisono.observe.clock import HostClock, epoch_of

KINDS = ("data", "forward", "backward", "comm", "wait", "optim", "other")

# The parts of a step as metrics.jsonl names them; all but comm_hidden add up to the wall time of the step.
PARTS = ("data", "forward", "backward", "comm_exposed", "comm_hidden", "wait", "optim", "other")


class Span(NamedTuple):
    """One stretch of time: nanoseconds of the recorder's clock, and tags (exposed axis op micro stage step bytes)."""

    kind: str
    start_ns: int
    stop_ns: int
    tags: dict[str, Any]


class Payload(NamedTuple):
    """What bytes were sent for: the axis, the operation, the algorithm that did it, and the codec whose payload it was.
    The last two are "" where there is none, or where nobody knows."""

    axis: str
    op: str
    algorithm: str = ""
    codec: str = ""


class Lap(NamedTuple):
    """What happened since the lap before: seconds per part, bytes sent per (axis, op), and per `Payload`.

    start_ns: when that lap ended, on the recorder's clock. start_s: the same in Unix time, on the clock of all hosts,
    and clock: what was taken out of this host's for that. calls: that ended. modules: of those that were timed, by
    name, seconds of their own in forward and in backward. host: what `observe.host_time` and `train.watch.kernels` say.
    """

    seconds: dict[str, float]
    nbytes: dict[tuple[str, str], int]
    ledger: dict[Payload, int]
    start_ns: int = 0
    start_s: float = 0.0
    clock: Mapping[str, float] = MappingProxyType({})
    calls: Sequence[LoggedCall] = ()
    modules: Mapping[str, tuple[float, float]] = MappingProxyType({})
    host: Mapping[str, Any] = MappingProxyType({})


class OpenSpan:
    """An open span; a class with slots because contextlib's generators cost three times as much."""

    __slots__ = ("call", "inner_ns", "kind", "outer", "recorder", "start_ns", "tags")

    def __init__(self, recorder: "Recorder", kind: str, tags: dict[str, Any]) -> None:
        self.recorder, self.kind, self.tags = recorder, kind, tags
        self.call: LoggedCall | None = None  # that is over when this span is

    def __enter__(self) -> Self:
        recorder = self.recorder
        self.inner_ns = 0
        self.outer = recorder._open
        recorder._open = self
        self.start_ns = recorder._clock()
        return self

    def __exit__(self, *_: object) -> None:
        recorder = self.recorder
        stop_ns = recorder._clock()
        recorder._open = self.outer
        if self.call is not None:
            self.call.done_ns = stop_ns
        recorder._close(self.kind, self.start_ns, stop_ns, self.inner_ns, self.outer, self.tags)


class Recorder:
    """The times and bytes of one rank.

    `span` belongs to the thread that runs the steps; `add` and `count` may be called from any thread.
    `step`, when set, is added to the tags of every span that is kept. `codec` is the name of the codec whose exchange
    is being issued, "" outside of one. `epoch_ns` (Unix time at clock zero) lets recorders of several processes be laid
    on one time axis, and `host_clock` those of several hosts. `calls` are the collectives. `blocked_ns` is all time so
    far in which this rank waited for others. `modules` are for the lap under way, see there. `also`, when
    set, gets every span besides, whoever keeps them: a profile does.
    """

    def __init__(self, rank: int = 0, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.rank = rank
        self.keep = False
        self.also: list[Span] | None = None
        self.step: int | None = None
        self.codec = ""
        self.epoch_ns = epoch_of(clock)
        self.host_clock = HostClock(self.epoch_ns, clock)
        self._clock = clock
        self._open: OpenSpan | None = None
        self._lock = threading.Lock()
        self._ns: dict[str, int] = {}
        self._bytes: dict[Payload, int] = {}
        self._kept: list[Span] = []
        self._lap_ns: dict[str, int] = {}
        self._lap_bytes: dict[Payload, int] = {}
        self._lap_start_ns = clock()
        self.calls = CallLog(clock)
        self.blocked_ns = 0
        self.modules: Mapping[str, tuple[float, float]] = {}

    def span(self, kind: str, **tags: Any) -> OpenSpan:
        """Context manager: the time inside belongs to `kind`, less what nested spans take."""
        return OpenSpan(self, kind, tags)

    def add(self, kind: str, start_ns: int, stop_ns: int, **tags: Any) -> None:
        """A span measured elsewhere; with `exposed=False` it ran beside the others and is taken from none."""
        self._close(kind, start_ns, stop_ns, 0, self._open, tags)

    def count(self, axis: str, op: str, nbytes: int, algorithm: str = "") -> None:
        """`nbytes` were sent by this rank along mesh axis `axis` by operation `op` (`all_reduce`, `send`, ...)."""
        key = Payload(axis, op, algorithm, self.codec)
        with self._lock:
            self._bytes[key] = self._bytes.get(key, 0) + nbytes

    @property
    def looks(self) -> bool:
        """Whether anybody will see single spans."""
        return self.keep or self.also is not None

    def mark(self, kind: str, **tags: Any) -> None:
        """A moment, for a profile alone: it has no length, and belongs to no part of the step."""
        if self.also is not None:
            now_ns = self._clock()
            self.also.append(Span(kind, now_ns, now_ns, {"step": self.step, **tags}))

    def call(self, axis: str, op: str, nbytes: int) -> LoggedCall:
        """This rank is ready for a collective, in whatever part of the step it is."""
        around = self._open
        while around is not None and around.kind in ("comm", "wait"):
            around = around.outer
        return self.calls.begin(axis, op, nbytes, "" if around is None else around.kind)

    def now_ns(self) -> int:
        """Nanoseconds of this recorder's clock."""
        return self._clock()

    def totals(self) -> dict[str, float]:
        """Seconds so far per part of PARTS (communication as `comm_exposed` and `comm_hidden`)."""
        with self._lock:
            return {kind: ns * 1e-9 for kind, ns in self._ns.items()}

    def bytes(self) -> dict[tuple[str, str], int]:
        """Bytes sent so far per (axis, operation)."""
        return _by_operation(self.ledger())

    def ledger(self) -> dict[Payload, int]:
        """Bytes sent so far by what they were sent for."""
        with self._lock:
            return dict(self._bytes)

    def lap(self) -> Lap:
        """Totals since the last lap (or the start): call it once a step."""
        with self._lock:
            seconds = {kind: (ns - self._lap_ns.get(kind, 0)) * 1e-9 for kind, ns in self._ns.items()}
            sent = {key: n - self._lap_bytes.get(key, 0) for key, n in self._bytes.items()}
            self._lap_ns, self._lap_bytes = dict(self._ns), dict(self._bytes)
        ledger = {key: n for key, n in sent.items() if n}
        start_ns, self._lap_start_ns = self._lap_start_ns, self._clock()
        host = self.host_clock
        start_s = round(host.shared_ns(start_ns) * 1e-9, 6)
        modules, self.modules = self.modules, {}
        calls = self.calls.take()
        return Lap(seconds, _by_operation(ledger), ledger, start_ns, start_s, host.says(), calls, modules)

    def take(self) -> list[Span]:
        """The spans kept since the last call; they are forgotten here, the totals stay."""
        with self._lock:
            kept, self._kept = self._kept, []
        return kept

    def _close(
        self,
        kind: str,
        start_ns: int,
        stop_ns: int,
        inner_ns: int,
        outer: OpenSpan | None,
        tags: dict[str, Any],
    ) -> None:
        part = kind
        exposed = tags.get("exposed", True)
        if kind == "comm":
            part = "comm_exposed" if exposed else "comm_hidden"
        spent_ns = stop_ns - start_ns
        if part in ("comm_exposed", "wait"):
            self.blocked_ns += spent_ns - inner_ns
        if exposed and outer is not None:
            outer.inner_ns += spent_ns
        with self._lock:
            self._ns[part] = self._ns.get(part, 0) + spent_ns - inner_ns
            if self.looks:
                if self.step is not None:
                    tags.setdefault("step", self.step)
                span = Span(kind, start_ns, stop_ns, tags)
                if self.keep:
                    self._kept.append(span)
                if self.also is not None:
                    self.also.append(span)


def _by_operation(ledger: dict[Payload, int]) -> dict[tuple[str, str], int]:
    sums: dict[tuple[str, str], int] = {}
    for key, nbytes in ledger.items():
        sums[key[:2]] = sums.get(key[:2], 0) + nbytes
    return sums
