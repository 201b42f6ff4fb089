"""Messages between replicas and servers: a JSON object and the bytes of tensors, over authenticated connections.

The connections are those of `multiprocessing.connection`: frames with a length, and both sides prove by HMAC that they
know the key. What they would pickle is not used.
"""

import json
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import torch
from torch import Tensor

_HEAD = struct.Struct("<Q")
HANDSHAKE = 10.0
"""Seconds in which a caller has to prove itself."""
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16,
                  torch.uint8, torch.bool)
}  # fmt: skip

Message = tuple[dict[str, Any], list[Tensor | None]]


def packed(said: dict[str, Any], tensors: Sequence[Tensor | None] = ()) -> bytes:
    """A message as bytes. Tensors are copied: who sends may change them at once. A sparse one travels as its rows."""
    described, parts = list[Any](), list[bytes]()
    for x in tensors:
        if x is None:
            described.append(None)
            continue
        each = (x.indices()[0], x.values()) if x.is_sparse else (x,)
        described.append(
            [list(x.shape), [[str(y.dtype).removeprefix("torch."), list(y.shape)] for y in each]]
        )
        parts += [_bytes(y) for y in each]
    head = json.dumps([said, described], separators=(",", ":")).encode()
    return b"".join((_HEAD.pack(len(head)), head, *parts))


def unpacked(data: bytes) -> Message:
    """Raises ValueError for what no replica and no server writes."""
    try:
        (size,) = _HEAD.unpack_from(data)
        said, described = json.loads(data[_HEAD.size : _HEAD.size + size])
        memory, at, tensors = bytearray(data), _HEAD.size + size, list[Tensor | None]()
        for entry in described:
            if entry is None:
                tensors.append(None)
                continue
            shape, parts = entry
            each = list[Tensor]()
            for name, part in parts:
                count = prod(part)
                each.append(_view(memory, _DTYPES[name], count, at).view(part))
                at += count * _DTYPES[name].itemsize
            tensors.append(each[0] if len(each) == 1 else _sparse(each[0], each[1], shape))
    except (struct.error, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"a message that no server writes: {error}") from error
    return said, tensors


def _bytes(x: Tensor) -> bytes:
    return x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _view(memory: bytearray, dtype: torch.dtype, count: int, at: int) -> Tensor:
    if not count:
        return torch.empty(0, dtype=dtype)
    raw = torch.frombuffer(memory, dtype=torch.uint8, count=count * dtype.itemsize, offset=at)
    return raw.clone().view(dtype)  # at an address that suits the dtype


def _sparse(rows: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.sparse_coo_tensor(
        rows[None], values, tuple(shape), is_coalesced=True, check_invariants=False
    )


def call(host: str, port: int, key: bytes, who: dict[str, Any], silence: float = 0.0) -> Connection:
    """A connection to a server. who: what the caller says of itself. silence: seconds of waiting for a byte, to come or
    to go, after which it raises BlockingIOError; for ever if 0. Raises OSError, EOFError, AuthenticationError."""
    sock = socket.create_connection((host, port), timeout=HANDSHAKE)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO) if silence else ():
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(silence), int(silence % 1 * 1e6)))
    connection = taken(sock)
    answer_challenge(connection, key)
    deliver_challenge(connection, key)
    connection.send_bytes(packed(who))
    connection.recv_bytes(1 << 16)  # a welcome: from here on it hears what the server says
    return connection


def answer(sock: socket.socket, key: bytes) -> tuple[Connection, dict[str, Any]]:
    """The connection of a caller that has proven itself, and what it says of itself. Raises OSError, EOFError,
    AuthenticationError, ValueError; the socket is closed then."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(HANDSHAKE), 0))
    connection = taken(sock)
    try:
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        who, _ = unpacked(connection.recv_bytes(1 << 16))
        with socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
        return connection, who
    except BaseException:
        connection.close()
        raise


def hang_up(connection: Connection) -> None:
    """End a connection on which another thread may be waiting."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as sock:
        sock.shutdown(socket.SHUT_RDWR)


def taken(sock: socket.socket) -> Connection:
    """The socket as a connection, which owns it."""
    sock.settimeout(None)
    with suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(sock.detach())
