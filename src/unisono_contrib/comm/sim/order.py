"""What happens before what on a device with streams: vector clocks (Mattern, 1988). No torch.

Each stream counts its operations. A stream knows of another stream's operations up to the one that it has waited for,
by an event, by `wait_stream`, or because the host had waited before it gave the stream its next operation. Two accesses
to one buffer, of which one writes, are a race unless one of them is known to whoever comes second.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

Clock = dict[int, int]  # stream → the number of its operation up to which all is known
_SKIPPED = ("/torch/", "/comm/sim/", "/threading.py", "/contextlib.py")


def joined(clock: Clock, other: Mapping[int, int]) -> None:
    """Let `clock` know all that `other` knows."""
    for stream, tick in other.items():
        if tick > clock.get(stream, 0):
            clock[stream] = tick


@dataclass(frozen=True, slots=True)
class Access:
    """One operation's access to a buffer. stream, tick: which operation. what: its name and the line that asked for
    it. spoil(): makes what the operation wrote wrong, because it may have read something else."""

    stream: int
    tick: int
    what: str
    spoil: Callable[[], None]

    def known_to(self, clock: Mapping[int, int]) -> bool:
        return clock.get(self.stream, 0) >= self.tick


@dataclass(frozen=True, slots=True)
class Race:
    """Two operations of which nothing says which comes first. kind: what the second would do too early."""

    kind: str
    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.second} does not wait for {self.first}"


class SimStream:
    """A queue of operations on the device, in the order in which they were asked for."""

    def __init__(self, timeline: "StreamTimeline", number: int) -> None:
        self.timeline, self.number = timeline, number
        self.clock: Clock = {number: 0}
        self._freed: list[Access] = []

    def begin(self) -> int:
        """Number the next operation. It comes after all that the host has waited for."""
        joined(self.clock, self.timeline.host)
        self.clock[self.number] += 1
        return self.clock[self.number]

    def free(self, uses: Iterable[Access]) -> None:
        """Memory that was taken for this stream is back, after these uses of it."""
        self._freed += uses

    def take(self) -> None:
        """The next operation takes memory, and may get any that is back."""
        for use in self._freed:
            if not use.known_to(self.clock):
                self.timeline.races.append(Race("taken again while in use", use.what, f"at {site()}: memory"))
                use.spoil()
        self._freed = []


@dataclass(slots=True)
class StreamTimeline:
    """The streams of one device, and what the host knows of them.

    host: what the host has waited for. races: seen so far. counts: operations and copies, by name. waits: how often
    the host waited, by line. late: copies to host memory that have not arrived, as the host sees it.
    """

    streams: list[SimStream] = field(default_factory=list)
    host: Clock = field(default_factory=dict)
    races: list[Race] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    late: "list[tuple[int, int, Callable[[], None]]]" = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def stream(self) -> SimStream:
        """A new one. The first is the default stream."""
        with self.lock:
            self.streams.append(SimStream(self, len(self.streams)))
            return self.streams[-1]

    def wait_on_host(self, clock: Mapping[int, int], counted: bool = True) -> None:
        """The host waits until these operations are over."""
        with self.lock:
            if counted:
                self.waits[site()] += 1
            joined(self.host, clock)
            arrived = [each for each in self.late if self.host.get(each[0], 0) >= each[1]]
            self.late = [each for each in self.late if self.host.get(each[0], 0) < each[1]]
        for _, _, arrive in arrived:
            arrive()

    def everything(self) -> Clock:
        """A clock that knows all operations so far."""
        return {stream.number: stream.clock[stream.number] for stream in self.streams}


Span = tuple[int, int]  # first byte of a buffer, and the byte behind


@dataclass(slots=True, weakref_slot=True, eq=False)
class DeviceBuffer:
    """Memory of the device under one or several tensors. home: the stream that it was taken for, to which it returns.
    spoiled: bytes that nobody can rely on. writes, reads: the latest accesses by the bytes that they reached. keepers:
    streams by `record_stream`, which are waited for before it is used again."""

    timeline: StreamTimeline
    home: SimStream
    nbytes: int
    give_back: Callable[[int], None]
    spoiled: list[Span] = field(default_factory=list)
    writes: list[tuple[Span, Access]] = field(default_factory=list)
    reads: list[tuple[Span, Access]] = field(default_factory=list)
    keepers: set[int] = field(default_factory=set)

    def spoil(self, span: Span) -> None:
        """Nobody can rely on these bytes until they are written again."""
        self.spoiled.append(span)

    def read(self, access: Access, span: Span, clock: Clock) -> bool:
        """Note a read; whether what it reads can be relied on."""
        safe = not any(_meet(span, bad) for bad in self.spoiled)
        for there, write in self.writes:
            if _meet(span, there) and not write.known_to(clock):
                self._race("read before it was written", write, access)
                safe = False
        self.reads = [(s, a) for s, a in self.reads if a.stream != access.stream or not _within(s, span)]
        self.reads.append((span, access))
        return safe

    def overwrite(self, access: Access, span: Span, clock: Clock) -> None:
        """Note a write. Whoever was reading, and is not waited for, has read something else."""
        self.spoiled = [bad for bad in self.spoiled if not _within(bad, span)]
        for there, read in self.reads:
            if _meet(span, there) and read.stream != access.stream and not read.known_to(clock):
                self._race("written while it was read", read, access)
                read.spoil()
        for there, write in self.writes:
            if _meet(span, there) and not write.known_to(clock):
                self._race("written while it was written", write, access)
                self.spoil(span)
        self.reads = [(s, a) for s, a in self.reads if not _within(s, span)]
        self.writes = [(s, a) for s, a in self.writes if not _within(s, span)]
        self.writes.append((span, access))

    def _race(self, kind: str, first: Access, second: Access) -> None:
        self.timeline.races.append(Race(kind, first.what, second.what))

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Its memory returns to its home stream."""
        if is_finalizing():
            return
        uses = [use for _, use in (*self.reads, *self.writes) if use.stream not in self.keepers]
        self.home.free(use for use in uses if not use.known_to(self.home.clock))
        self.give_back(self.nbytes)


def _meet(a: Span, b: Span) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def _within(a: Span, b: Span) -> bool:
    return b[0] <= a[0] and a[1] <= b[1]


def site() -> str:
    """FILE:LINE of the innermost frame that is neither torch's nor this package's; "backward" where there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(part in name for part in _SKIPPED) and not name.startswith("<"):
            return f"{'/'.join(name.split('/')[-3:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "backward"
