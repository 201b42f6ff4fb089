"""Messages between workers: a JSON object and the bytes of tensors, in frames of a link.

The first frame begins with two numbers, bytes of the JSON and bytes of all. What follows is cut into pieces, since a
frame has an end. The form is that of safetensors: a header that says dtype and shape of each tensor, then their
elements without holes but those of alignment.
"""

import json
import struct
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from unisono.train.state.checkpoint.tensorfile import DTYPES, NAMES, as_bytes

PIECE = 1 << 20
"""Bytes of a frame."""
MOST = 1 << 40
"""Bytes of a message; more is a sign of a stream read out of step."""
_HEAD = struct.Struct("<QQ")
_ALIGNED = 16

Message = tuple[dict[str, Any], list[Tensor]]


def frames_of(head: dict[str, Any], tensors: Sequence[Tensor] = ()) -> list[bytes]:
    """The frames of a message. Tensors are copied: who sends may change them at once."""
    parts: list[Any] = []
    size = 0
    for x in tensors:
        data = as_bytes(x)
        fill = -len(data) % _ALIGNED
        parts += [data, bytes(fill)]
        size += len(data) + fill
    described = {**head, "tensors": [[NAMES[x.dtype], list(x.shape)] for x in tensors]} if tensors else head
    text = json.dumps(described, separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-len(text) % _ALIGNED)
    whole = b"".join([_HEAD.pack(len(text), len(text) + size), text, *parts])
    return [whole[at : at + PIECE] for at in range(0, len(whole), PIECE)]


class MessageReader:
    """Puts frames of one link together to messages."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._text = self._size = 0

    def feed(self, frame: bytes) -> Message | None:
        """The message that this frame completes. Raises ValueError for what no worker writes."""
        if not self._size:
            if len(frame) < _HEAD.size:
                raise ValueError("a message without a head")
            self._text, self._size = _HEAD.unpack_from(frame)
            if not 0 < self._text <= self._size <= MOST:
                raise ValueError("a message of an impossible length")
            frame = frame[_HEAD.size :]
        self._data += frame
        if len(self._data) < self._size:
            return None
        if len(self._data) > self._size:
            raise ValueError("more came than a message")
        data, text, self._data, self._size = self._data, self._text, bytearray(), 0
        try:
            head = json.loads(data[:text])
        except RecursionError as error:
            raise ValueError("a message nested too deep") from error
        if not isinstance(head, dict):
            raise ValueError("a message that is no object")
        return head, _tensors_in(head.pop("tensors", []), data, text)


def _tensors_in(described: Any, data: bytearray, at: int) -> list[Tensor]:
    """The tensors behind a header: views of `data`, from byte `at`. Raises ValueError."""
    tensors = []
    for entry in described if isinstance(described, list) else ():
        match entry:
            case [str(name), list(shape)] if name in DTYPES and all(type(n) is int and n >= 0 for n in shape):
                dtype, count = DTYPES[name], prod(shape)
            case _:
                raise ValueError("a tensor that nobody described")
        size = count * dtype.itemsize
        if at + size > len(data):
            raise ValueError("a tensor longer than its message")
        flat = (
            torch.frombuffer(data, dtype=dtype, count=count, offset=at)
            if count
            else torch.empty(0, dtype=dtype)
        )
        tensors.append(flat.reshape(shape))
        at += size + -size % _ALIGNED
    return tensors
