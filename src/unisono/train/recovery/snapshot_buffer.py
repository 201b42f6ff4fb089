"""Memory outside a rank where snapshots of its state outlive it.

A *snapshot* is what a rank holds of the run after one step. A buffer has room for two. They alternate, and the one that
is written counts only when all of it is there: a rank that dies while it writes leaves the other as it was.

The memory is that of the same host: files without a name, made and kept open by the process that starts ranks. Who
takes a rank's place is given the same two. A replica on another host is the same bytes in files there (`replication`).

    file     head · tensors, the widest elements first, without gaps · table (JSON: what is what, with sums)
    head     written last; wiped before anything else is written
"""

import json
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from unisono.train.state.checkpoint.boxes import Box
from unisono.train.state.checkpoint.tensorfile import DTYPES, NAMES, as_bytes

_HEAD = struct.Struct("<8sqqqII")
"""Mark, step, where the table begins, its bytes, CRC-32 of the table, CRC-32 of all before."""
_MARK = b"unisnap1"
_FIRST = 64  # where tensors begin: aligned for every dtype
_AT_ONCE = 256  # buffers of one write: the kernel takes 1024
_PART = 4 << 20  # bytes of a snapshot that are copied at once

Write = Callable[[int, Sequence[Any], int], int]
"""(file, buffers, where) → bytes written, as os.pwritev."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a rank held after `step` steps. state: JSON values beside. sound(): whether its numbers are those that were
    put there; reads all of them. live: it is no copy, but what the rank trains with."""

    step: int
    state: Mapping[str, Any]
    boxes: Sequence[Box]
    sound: Callable[[], bool] = lambda: True
    live: bool = False


class SnapshotBuffer:
    """A rank's two latest snapshots, or those of the rank that it replaces: two files in memory, which outlive
    the rank as long as somebody else has them open."""

    def __init__(self, files: Sequence[int], write: Write = os.pwritev) -> None:
        self._files, self._write = tuple(files), write

    @classmethod
    def new(cls) -> "SnapshotBuffer":
        """On files of its own, which last as long as this process."""
        return cls([os.memfd_create(f"snapshot {number}", os.MFD_CLOEXEC) for number in range(2)])

    def close(self) -> None:
        """Let its files go."""
        for file in self._files:
            os.close(file)

    def newest(self) -> tuple[int, int]:
        """The file of the newest snapshot, and its bytes; (-1, 0) where none is whole."""
        file = max(self._files, key=self._step)
        return (file, os.fstat(file).st_size) if self._step(file) >= 0 else (-1, 0)

    def older(self) -> int:
        """A file for a copy of another's snapshot, in the place of the older one, of which nothing is left."""
        file = min(self._files, key=self._step)
        self._wipe(file)
        os.ftruncate(file, _HEAD.size)
        return file

    def put(self, step: int, state: Mapping[str, Any], boxes: Sequence[Box]) -> None:
        """Keep these boxes, in the place of the older snapshot. Raises OSError; then only the newer one is left."""
        file = min(self._files, key=self._step)
        self._wipe(file)
        ordered = sorted(boxes, key=lambda box: -box.tensor.element_size())
        at, rows, due = _FIRST, list[list[Any]](), list[memoryview]()
        for box in ordered:
            data = as_bytes(box.tensor)
            rows.append(
                [
                    box.name,
                    box.full_shape,
                    NAMES[box.tensor.dtype],
                    box.start,
                    tuple(box.tensor.shape),
                    _sum(data),
                ]
            )
            due.append(data)
            if len(due) == _AT_ONCE:
                at, due = self._write_all(file, due, at), []
        at = self._write_all(file, due, at)
        table = json.dumps({"state": state, "boxes": rows}, separators=(",", ":")).encode()
        end = self._write_all(file, [memoryview(table)], at)
        os.ftruncate(file, end)  # a larger one lay here before
        head = _HEAD.pack(_MARK, step, at, len(table), zlib.crc32(table), 0)[:-4]
        self._write_all(file, [memoryview(head + struct.pack("<I", zlib.crc32(head)))], 0)

    def snapshots(self) -> list[Snapshot]:
        """The whole snapshots, the newest first. Their boxes are read where they lie, so they last until the next
        put."""
        whole = [snapshot for file in self._files if (snapshot := self._read(file)) is not None]
        return sorted(whole, key=lambda snapshot: -snapshot.step)

    def drop(self, after: int) -> None:
        """Forget those of later steps than `after`: the run goes another way from there."""
        for file in self._files:
            if self._step(file) > after:
                self._wipe(file)

    def _wipe(self, file: int) -> None:
        self._write_all(file, [memoryview(bytes(_HEAD.size))], 0)

    def _write_all(self, file: int, due: Sequence[memoryview], at: int) -> int:
        """Write buffers one after the other; returns where they end. One call may take less than all."""
        left = [view for view in due if len(view)]
        while left:
            count = self._write(file, left, at)
            at += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]
        return at

    def _head(self, file: int) -> tuple[int, int, int, int] | None:
        """(step, where the table begins, its bytes, its CRC-32); None where no snapshot is whole."""
        head = os.pread(file, _HEAD.size, 0)
        if len(head) < _HEAD.size:
            return None
        mark, step, at, count, table_sum, head_sum = _HEAD.unpack(head)
        return (step, at, count, table_sum) if mark == _MARK and head_sum == zlib.crc32(head[:-4]) else None

    def _step(self, file: int) -> int:
        """The step of the snapshot in a file; -1 where none is whole."""
        head = self._head(file)
        return -1 if head is None else head[0]

    def _read(self, file: int) -> Snapshot | None:
        if (head := self._head(file)) is None:
            return None
        step, at, count, table_sum = head
        text = os.pread(file, count, at)
        if zlib.crc32(text) != table_sum:
            return None
        table = json.loads(text)
        # Private: nobody writes to it, and torch wants memory that could be written to.
        whole = torch.frombuffer(mmap.mmap(file, at + count, access=mmap.ACCESS_COPY), dtype=torch.uint8)
        boxes, sums, place = list[Box](), list[int](), _FIRST
        for name, full, dtype, start, shape, total in table["boxes"]:
            stop = place + prod(shape) * DTYPES[dtype].itemsize
            boxes.append(
                Box(name, tuple(full), tuple(start), whole[place:stop].view(DTYPES[dtype]).view(shape))
            )
            sums.append(total)
            place = stop
        return Snapshot(
            step, table["state"], boxes, lambda: [_sum(as_bytes(box.tensor)) for box in boxes] == sums
        )


def parts(nbytes: int) -> list[tuple[int, int]]:
    """The parts of a snapshot of so many bytes as (offset, bytes), in the order in which they are copied: the head
    last."""
    body = [(at, min(_PART, nbytes - at)) for at in range(_FIRST, nbytes, _PART)]
    return [*body, (0, _FIRST)] if body else []


def _sum(data: memoryview) -> int:
    """The sum of all bytes as 64-bit words that wrap around: quicker than a copy, and without threads, unlike
    torch's."""
    whole = len(data) - len(data) % 8
    words = np.frombuffer(data[:whole], dtype=np.int64)
    return int(np.add.reduce(words)) + int.from_bytes(data[whole:], "little")
