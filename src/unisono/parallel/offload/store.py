"""Homes of tensors away from where they are computed with: in the host's memory, or in a file mapped into it."""

import mmap
import os
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.comm.device import Lane, has_numbers, host_room, is_apart
from unisono.spec.errors import Infeasible

_SEGMENT = 16 << 20
"""Bytes by which the file grows at least: a mapping for each small tensor would cost more than the tensor."""


class Layout(NamedTuple):
    """How a tensor lies in its storage."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def of(self, there: Tensor) -> Tensor:
        """The tensor that lies so in these bytes, uint8 [nbytes]."""
        flat = there.view(self.dtype) if there.numel() else there.new_empty(0, dtype=self.dtype)
        return torch.as_strided(flat, self.shape, self.stride, self.offset)


def layout_of(x: Tensor) -> Layout:
    return Layout(x.shape, x.stride(), int(x.storage_offset()), x.dtype)


class Home:
    """A place for the bytes of one tensor. `bytes`: uint8 [nbytes], in host memory."""

    def __init__(self, room: Tensor, pages: tuple[mmap.mmap, int] | None) -> None:
        self.bytes, self._pages = room, pages
        self._coming: tuple[Tensor, Callable[[], None]] | None = None

    def advise(self, what: int) -> None:
        if self._pages is not None:
            segment, start = self._pages
            segment.madvise(what, start, _pages(self.bytes.numel()))


class Store:
    """The homes of one rank. away: bytes that lie in them, now and at most.

    folder: where the file lies, which has no name there, so that nothing is left behind however a run ends.
    """

    def __init__(self, device: torch.device, on_disk: bool = False, folder: Path | None = None) -> None:
        self.device, self.on_disk, self.folder = device, on_disk, folder or Path(tempfile.gettempdir())
        self.away = self.most = 0
        self._lane = Lane(device)
        self._free: dict[int, list[Home]] = defaultdict(list)
        self._ours: set[int] = set()
        self._file: Any = None
        self._length = 0
        self._segment: tuple[mmap.mmap, int, int] | None = None  # and its next free byte, and its length

    def home(self, nbytes: int) -> Home:
        """Raises Infeasible M02 where the disk has no room for it."""
        free = self._free[nbytes]
        memory = free.pop() if free else self._in_file(nbytes) if self.on_disk and has_numbers(self.device) else Home(
            host_room(nbytes, self.device), None
        )  # fmt: skip
        self._ours.add(memory.bytes.untyped_storage()._cdata)
        self.away += nbytes
        self.most = max(self.most, self.away)
        return memory

    def holds(self, x: Tensor) -> bool:
        """Whether x lies in a home; they are used again, and never given up."""
        return x.untyped_storage()._cdata in self._ours

    def leave(self, home: Home) -> None:
        """Nobody needs what lies there any more."""
        home._coming = None
        self.away -= home.bytes.numel()
        self._free[home.bytes.numel()].append(home)

    def put(self, x: Tensor, home: Home) -> None:
        """Copy all of x's storage home; x may be let go of, and not be changed."""
        home._coming = None
        self._lane.copy(home.bytes, _bytes_of(x))
        home.advise(mmap.MADV_DONTNEED)  # of this process; the system writes the pages out in its own time

    def ahead(self, home: Home) -> None:
        """What lies there will be fetched soon."""
        if not is_apart(self.device):
            home.advise(mmap.MADV_WILLNEED)
        elif home._coming is None:
            there = torch.empty_like(home.bytes, device=self.device)
            home._coming = there, self._lane.copy(there, home.bytes)

    def fetch(self, home: Home) -> Tensor:
        """A new copy of what lies there, uint8 [nbytes] on the device."""
        there, wait = home._coming or (None, None)
        home._coming = None
        if there is None or wait is None:
            there = torch.empty_like(home.bytes, device=self.device)
            wait = self._lane.copy(there, home.bytes)
        wait()
        home.advise(mmap.MADV_DONTNEED)
        return there

    def settle(self) -> None:
        """Return when everything that was put is there, for who reads homes themselves."""
        self._lane.drain()

    def _in_file(self, nbytes: int) -> Home:
        room = _pages(nbytes)
        segment, start, length = self._segment or self._grown(room)
        if start + room > length:
            segment, start, length = self._grown(room)
        self._segment = segment, start + room, length
        there = torch.frombuffer(segment, dtype=torch.uint8, count=nbytes, offset=start) if nbytes else None
        return Home(torch.empty(0, dtype=torch.uint8) if there is None else there, (segment, start))

    def _grown(self, room: int) -> tuple[mmap.mmap, int, int]:
        """Room is asked for before it is written to: a full disk is an error here, and would be a signal there."""
        length = max(room, _SEGMENT)
        try:
            if self._file is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115  (as long as the store)
                weakref.finalize(self, self._file.close)
            os.posix_fallocate(self._file.fileno(), self._length, length)
        except OSError as error:
            free = 0
            with suppress(OSError):
                space = os.statvfs(self.folder)
                free = space.f_bavail * space.f_frsize
            raise Infeasible(
                f"{error.strerror}: offload to disk needs {self._length + length >> 20} MiB of this rank's,"
                f" {free >> 20} MiB are free",
                where=str(self.folder),
                fix="offload=...:to=host, an out.dir on a larger disk, or shard=N in the plan",
                code="M02",
            ) from error
        segment = mmap.mmap(self._file.fileno(), length, offset=self._length)
        self._length += length
        return segment, 0, length


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _bytes_of(x: Tensor) -> Tensor:
    """The whole storage of x, uint8 [nbytes]."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def nbytes_of(x: Tensor) -> int:
    """Bytes of x's whole storage."""
    return x.untyped_storage().nbytes()
