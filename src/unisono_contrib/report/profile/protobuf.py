"""Protocol buffers' wire format, as far as Perfetto's TrackEvent needs it: fields are written, none is read.

A message is the bytes of its fields one after the other, so traces may be joined end to end. Field numbers are those
of `perfetto_trace.proto`; a test reads what is written by Perfetto's own classes.
"""

import struct
from enum import IntEnum

_VARINT, _FIXED64, _BYTES = 0, 1, 2


class TrackEventType(IntEnum):
    """`TrackEvent.Type`."""

    BEGIN = 1
    END = 2
    INSTANT = 3
    COUNTER = 4


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


def fixed64(field: int, value: int) -> bytes:
    """A field of a fixed64."""
    return varint(field << 3 | _FIXED64) + struct.pack("<Q", value & (1 << 64) - 1)


def double(field: int, value: float) -> bytes:
    """A field of a double."""
    return varint(field << 3 | _FIXED64) + struct.pack("<d", value)


def message(field: int, content: bytes | str) -> bytes:
    """A field of text, bytes, or a message inside."""
    data = content.encode() if isinstance(content, str) else content
    return varint(field << 3 | _BYTES) + varint(len(data)) + data
