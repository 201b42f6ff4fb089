"""Frames on a stream socket, fields in a frame, and messages that carry file descriptors. No torch.

Two forms are spoken between supervisor and ranks: JSON objects (events; for people and programs to read) and
lists of byte fields (the store; keys and values are arbitrary bytes). Neither can run code when it is read,
which is why there is no pickle.
"""

import json
import os
import socket
import struct
from collections.abc import Iterable, Sequence
from typing import Any

HEAD = struct.Struct("<I")
ROOM = 1 << 15
"""Bytes of a message that goes as it is; a longer one goes as a file in memory, since a datagram has an end."""
_AS_FILE = b"file"
MOST = 1 << 28
"""Bytes; a longer frame is a sign of a stream read out of step, not of a message."""


def frame(payload: bytes) -> bytes:
    """`payload` behind its length."""
    return HEAD.pack(len(payload)) + payload


class Frames:
    """Cuts what a stream delivers into frames of at most `most` bytes, whatever the pieces it comes in. rest: the begin
    of a frame that has not come whole."""

    def __init__(self, most: int = MOST) -> None:
        self.rest, self._most = bytearray(), most

    def feed(self, data: bytes) -> list[bytes]:
        """All frames that `data` completes. Raises ValueError when the stream cannot be ours."""
        self.rest += data
        whole, at = list[bytes](), 0
        while len(self.rest) - at >= HEAD.size:
            (length,) = HEAD.unpack_from(self.rest, at)
            if length > self._most:
                raise ValueError(f"a frame of {length} bytes")
            stop = at + HEAD.size + length
            if len(self.rest) < stop:
                break
            whole.append(bytes(self.rest[at + HEAD.size : stop]))
            at = stop
        del self.rest[:at]
        return whole


def read_frame(sock: socket.socket, most: int = MOST) -> bytes:
    """The next frame of a blocking socket. Raises ConnectionError when the other side has left, ValueError for a frame
    of more than `most` bytes."""
    (length,) = HEAD.unpack(_read(sock, HEAD.size))
    if length > most:
        raise ValueError(f"a frame of {length} bytes")
    return _read(sock, length)


def _read(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise ConnectionError("the other side closed the connection")
        data += piece
    return bytes(data)


def join(fields: Iterable[bytes]) -> bytes:
    """One payload of many byte fields."""
    return b"".join(frame(field) for field in fields)


def split(payload: bytes) -> list[bytes]:
    """Inverse of `join`. Raises ValueError on a payload that ends inside a field."""
    cutter = Frames()
    fields = cutter.feed(payload)
    if sum(HEAD.size + len(field) for field in fields) != len(payload):
        raise ValueError("a payload that ends inside a field")
    return fields


def event(payload: bytes) -> dict[str, Any]:
    """The event in a frame: an object with a text as its `kind`, "odd" where it is none."""
    try:
        message = json.loads(payload)
    except (ValueError, RecursionError):
        message = None
    return message if isinstance(message, dict) and isinstance(message.get("kind"), str) else {"kind": "odd"}


def dumps(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def send_message(sock: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """One JSON object of any length, with open files attached, over a SOCK_SEQPACKET socket."""
    data = dumps(message)
    if len(data) <= ROOM:
        socket.send_fds(sock, [data], list(fds))
        return
    with os.fdopen(os.memfd_create("message", os.MFD_CLOEXEC), "wb") as file:
        file.write(data)
        file.flush()
        socket.send_fds(sock, [_AS_FILE], [file.fileno(), *fds])


def read_message(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next object and its files; None when the other side has left. The files are the caller's to close."""
    try:
        data, fds, _, _ = socket.recv_fds(sock, ROOM, 16)
    except (
        ConnectionResetError
    ):  # told once, where it left words of ours unread: what it said before that comes now
        data, fds, _, _ = socket.recv_fds(sock, ROOM, 16)
    if data == _AS_FILE:
        with os.fdopen(fds.pop(0), "rb") as file:
            file.seek(0)
            data = file.read()
    return (json.loads(data), list(fds)) if data else None
