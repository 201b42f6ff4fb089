"""A trace in Perfetto's TrackEvents, packet after packet: tracks, slices that lie in each other, counters, arrows.

Field numbers are those of `perfetto_trace.proto`; a test reads what is written by Perfetto's own classes. Messages are
the bytes of their fields one after the other, so two traces joined end to end are one.
"""

import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

_VARINT, _FIXED64, _BYTES = 0, 1, 2  # kinds of fields on the wire
_BEGIN, _END, _INSTANT, _COUNTER = 1, 2, 3, 4  # TrackEvent.Type
_SIZE_BYTES = 3  # CounterDescriptor.Unit
_SEQUENCE = 1  # packets of one writer share it


class Slice(NamedTuple):
    """A stretch of a track, or a moment where both times are equal; nanoseconds. flows: numbers of arrows that go
    through it. ends: of those that end in it."""

    start_ns: int
    stop_ns: int
    name: str
    category: str = ""
    notes: Mapping[str, Any] = {}
    flows: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


class TraceFile:
    """A trace that is written. zero_ns: what its times count from."""

    def __init__(self, zero_ns: int) -> None:
        self._zero_ns, self._packets, self._tracks = zero_ns, list[bytes](), 0

    def process(self, pid: int, name: str) -> int:
        """A track that others lie in; its number."""
        return self._track(message(3, number(1, pid) + message(6, name)))

    def track(self, process: int, name: str, place: int) -> int:
        """A track of slices. place: among its siblings."""
        return self._track(number(5, process) + message(2, name) + number(12, place))

    def counter(self, process: int, name: str) -> int:
        """A track of a number of bytes."""
        return self._track(number(5, process) + message(2, name) + message(8, number(3, _SIZE_BYTES)))

    def slices(self, track: int, slices: Iterable[Slice]) -> None:
        """Put slices on a track, each inside of those that last when it begins. One that outlives what it lies in, by
        the last digit of a clock, ends with that."""
        ends: list[int] = []
        for part in sorted(slices, key=lambda part: (part.start_ns, -part.stop_ns)):
            while ends and ends[-1] <= part.start_ns:
                self._event(ends.pop(), number(9, _END) + number(11, track))
            kind = _BEGIN if part.stop_ns > part.start_ns else _INSTANT
            self._event(part.start_ns, number(9, kind) + number(11, track) + _body(part))
            if kind == _BEGIN:
                ends.append(min([part.stop_ns, *ends[-1:]]))
        while ends:
            self._event(ends.pop(), number(9, _END) + number(11, track))

    def value(self, track: int, at_ns: int, value: int) -> None:
        """A counter's value from a moment on."""
        self._event(at_ns, number(9, _COUNTER) + number(11, track) + number(30, value))

    def content(self) -> bytes:
        """The bytes of the file."""
        return b"".join(self._packets)

    def _event(self, at_ns: int, body: bytes) -> None:
        stamped = number(8, at_ns - self._zero_ns) + number(10, _SEQUENCE)
        self._packets.append(message(1, stamped + message(11, body)))

    def _track(self, body: bytes) -> int:
        self._tracks += 1
        self._packets.append(message(1, number(10, _SEQUENCE) + message(60, number(1, self._tracks) + body)))
        return self._tracks


def _body(part: Slice) -> bytes:
    body = [message(23, part.name)]
    if part.category:
        body.append(message(22, part.category))
    body += [_fixed64(47, flow) for flow in part.flows] + [_fixed64(48, flow) for flow in part.ends]
    for key, value in part.notes.items():
        said = number(4, value) if isinstance(value, int) else message(6, str(value))
        body.append(message(4, message(10, key) + said))
    return b"".join(body)


def varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; negative numbers as 64 bits."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number(field: int, value: int) -> bytes:
    """A field of an integer or an enum."""
    return varint(field << 3 | _VARINT) + varint(value)


def message(field: int, content: bytes | str) -> bytes:
    """A field of text, or of a message."""
    data = content.encode() if isinstance(content, str) else content
    return varint(field << 3 | _BYTES) + varint(len(data)) + data


def _fixed64(field: int, value: int) -> bytes:
    return varint(field << 3 | _FIXED64) + struct.pack("<Q", value)
