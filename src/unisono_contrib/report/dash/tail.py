"""Files of JSON lines that grow: each byte is read once, and of what comes too fast only some lines."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Record = dict[str, Any]
MOST = 4 << 20
"""Bytes of a file that are read at once."""
_APART = 64  # steps between two entries of the index
_LINE = b'{"kind":"step","step":%d,'  # as a rank begins the line of a step


def parsed(line: bytes) -> Record | None:
    """The object in a line; None for one that is damaged."""
    with suppress(ValueError, RecursionError):
        record = json.loads(line)
        return record if isinstance(record, dict) else None
    return None


def read_at(path: str | Path, offset: int, most: int = MOST) -> tuple[bytes, int, int]:
    """(bytes from an offset on, size of the file, its inode); nothing of a file that is not there."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b"", 0, 0
    try:
        seen = os.fstat(fd)
        return os.pread(fd, most, offset) if seen.st_size > offset else b"", seen.st_size, seen.st_ino
    except OSError:
        return b"", 0, 0
    finally:
        os.close(fd)


@dataclass(slots=True)
class LineTail:
    """The end of a file that grows. offset: of the first byte that was not read; it is the begin of a line.

    restarts: how often the file was replaced by a shorter one, as going on from a checkpoint does.
    """

    path: str
    offset: int = 0
    restarts: int = 0
    _inode: int = 0

    def read(self, most: int = MOST) -> bytes:
        """The whole lines that have come since, at most so many bytes of them."""
        chunk, size, inode = read_at(self.path, self.offset, most)
        if inode and self._inode and (inode != self._inode or size < self.offset):
            self.restarts, self.offset = self.restarts + 1, 0
            chunk, size, inode = read_at(self.path, 0, most)
        self._inode = inode or self._inode
        end = chunk.rfind(b"\n") + 1
        if not end and len(chunk) == most and most < MOST:
            return self.read(MOST)  # a line longer than what was asked for
        self.offset += end
        return chunk[:end]

    def records(self) -> list[Record]:
        """The objects of the lines that have come since."""
        records = (parsed(line) for line in self.read().splitlines())
        return [record for record in records if record is not None]


@dataclass(slots=True)
class RankTail:
    """The events of one rank. index: (step, offset of its line), about one in 64 steps, in order of the file."""

    rank: int
    lines: LineTail
    index: list[tuple[int, int]] = field(default_factory=list)
    last: int = 0
    restarts: int = 0

    def read(self, every: int, most: int = MOST) -> list[Record]:
        """What has come since: of steps those whose number `every` divides, and all other lines."""
        begin = self.lines.offset
        chunk = self.lines.read(most)
        if self.lines.restarts != self.restarts:
            self.restarts, begin, self.last = self.lines.restarts, 0, 0
            self.index.clear()
        if not chunk:
            return []
        picked = list(_every(chunk, every)) if every > 1 else list(_all(chunk))
        records = []
        for at, line in picked:
            record = parsed(line)
            if record is None:
                continue
            records.append(record)
            step = record.get("step")
            if isinstance(step, int) and record.get("kind") == "step":
                if step <= self.last:  # done again after a loss
                    self.index = [entry for entry in self.index if entry[0] < step]
                if not self.index or step - self.index[-1][0] >= _APART:
                    self.index.append((step, begin + at))
                self.last = step
        return records

    def between(self, first: int, last: int) -> list[Record]:
        """The lines of the steps from `first` to `last`, read anew."""
        begin = max((offset for step, offset in self.index if step <= first), default=0)
        until = min((offset for step, offset in self.index if step > last), default=self.lines.offset)
        chunk, _, _ = read_at(self.lines.path, begin, max(0, until - begin))
        at, records = 0, []
        for step in range(first, last + 1):
            place = chunk.find(_LINE % step, at)
            if place >= 0:
                at = place
                records.append(parsed(chunk[place : chunk.find(b"\n", place)]))
        return [record for record in records if record is not None]

    def newest(self, most: int = 1 << 14) -> list[Record]:
        """What the file ends with, read ahead of all that comes before."""
        _, size, _ = read_at(self.lines.path, 0, 0)
        chunk, _, _ = read_at(self.lines.path, max(0, size - most), most)
        begin = chunk.find(b"\n") + 1 if size > most else 0
        records = (parsed(line) for line in chunk[begin : chunk.rfind(b"\n") + 1].splitlines())
        return [record for record in records if record is not None]


def _all(chunk: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    for line in chunk.splitlines(keepends=True):
        yield at, line
        at += len(line)


def _every(chunk: bytes, every: int) -> Iterator[tuple[int, bytes]]:
    """(place, line) of every so many steps, and of lines that say who a rank is; the others are not looked at."""
    at = chunk.find(b'{"kind":"info"')
    while at >= 0:  # a start: steps may be counted from an earlier one again
        yield at, chunk[at : chunk.index(b"\n", at)]
        at = chunk.find(b'{"kind":"info"', at + 1)
    first = chunk.find(b'"step":')
    number = chunk[first + 7 : chunk.find(b",", first)] if first >= 0 else b""
    if not number.isdigit():
        return
    step, at = -(-int(number) // every) * every, 0
    while (at := chunk.find(_LINE % step, at)) >= 0:
        yield at, chunk[at : chunk.index(b"\n", at)]
        step += every
