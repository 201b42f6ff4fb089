"""Parts of shards that were read: kept on disk within a bound, for all processes of a host, and read ahead in threads.

A cache that takes nothing more is done without: parts are read into memory then, which is said once.
"""

import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Generic, TypeVar
from zlib import crc32

from unisono.train.data.cache import FULL, unwritable
from unisono.train.data.worker_pool import on_stderr

T = TypeVar("T")
_LOCKS = 64  # files under which processes make parts one at a time
_STALE = 3600.0  # seconds after which a half-made part is of a process that was killed


@dataclass(slots=True)
class PartCache:
    """Folders of parts below `root`, together of at most `limit` bytes: the one unused for longest goes first."""

    root: Path
    limit: int
    _is_full: bool = False

    def kept(self, name: str, make: Callable[[Path], object], opened: Callable[[Path, bool], T]) -> T:
        """What `opened` makes of a part's folder. make(folder): writes the part, if nobody has before. opened(folder,
        whether it stays): called again where another process has removed it. Raises UsageError D15 where neither
        the cache nor the system's folder for temporary files can be written, and what `make` raises."""
        folder = self.root / name
        while not self._is_full:
            with suppress(FileNotFoundError):
                os.utime(folder)
                return opened(folder, True)
            try:
                self._make_once(folder, make)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                self._is_full = True
                on_stderr(
                    f"the cache {self.root} takes nothing ({error.strerror}): shards are read without it\n"
                )
        try:
            with tempfile.TemporaryDirectory(prefix="unisono-part-") as place:
                make(Path(place))
                return opened(Path(place), False)
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise unwritable(self.root, error.strerror or str(error)) from error

    def _make_once(self, folder: Path, make: Callable[[Path], object]) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        with _locked(self.root / f".lock-{crc32(folder.name.encode()) % _LOCKS}"):
            if folder.exists():
                return
            aside = self.root / f".part-{secrets.token_hex(8)}"
            try:
                aside.mkdir()
                make(aside)
                with _locked(self.root / ".lock"):
                    self._make_room(_bytes_of(aside))
                    aside.rename(folder)
            finally:
                shutil.rmtree(aside, ignore_errors=True)

    def _make_room(self, wanted: int) -> None:
        there: list[tuple[float, int, Path]] = []
        for entry in os.scandir(self.root):
            with suppress(FileNotFoundError):
                if not entry.is_dir():
                    continue
                last = entry.stat().st_mtime
                if entry.name.startswith("."):
                    if last < time.time() - _STALE:
                        shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    there.append((last, _bytes_of(Path(entry.path)), Path(entry.path)))
        total = wanted + sum(size for _, size, _ in there)
        for _, size, path in sorted(there):
            if total <= self.limit:
                return
            shutil.rmtree(path, ignore_errors=True)  # who has it open goes on reading
            total -= size


def _bytes_of(folder: Path) -> int:
    with os.scandir(folder) as entries:
        return sum(entry.stat().st_size for entry in entries)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        with suppress(OSError):  # a file system without locks: two processes may make one part
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@dataclass(slots=True)
class PartReader(Generic[T]):
    """Parts by number, opened. opened(number): reads one, in any thread. threads: that read ahead. most: parts that
    are held open, of which those used last."""

    opened: Callable[[int], T]
    threads: int
    most: int
    _held: "OrderedDict[int, Future[T]]" = field(default_factory=OrderedDict)
    _wanted: "SimpleQueue[tuple[int, Future[T]]]" = field(default_factory=SimpleQueue)
    _lock: Lock = field(default_factory=Lock)
    _pid: int = -1

    def get(self, number: int) -> T:
        """A part; waited for if it is on its way, read in this thread if nobody has begun. Raises what `opened`
        raises."""
        with self._lock:
            future = self._held.get(number)
            if future is None:
                future = self._hold(number)
            else:
                self._held.move_to_end(number)
        try:
            self._read(number, future)
            return future.result()
        except Exception:
            with self._lock:
                self._held.pop(number, None)  # who asks again tries again
            raise

    def expect(self, numbers: Sequence[int]) -> None:
        """Begin to read those that are not at hand. Returns at once."""
        with self._lock:
            missing = [(number, self._hold(number)) for number in numbers if number not in self._held]
            if missing and self._pid != os.getpid():  # a fork has no threads of its parent's
                self._pid, self._wanted = os.getpid(), SimpleQueue()
                for i in range(self.threads):
                    Thread(
                        target=self._serve, args=(self._wanted,), name=f"unisono-parts-{i}", daemon=True
                    ).start()
        for each in missing:
            self._wanted.put(each)

    def _hold(self, number: int) -> "Future[T]":
        future: Future[T] = Future()
        self._held[number] = future
        for old in [n for n, f in self._held.items() if f.done()][: max(0, len(self._held) - self.most)]:
            del self._held[old]
        return future

    def _serve(self, wanted: "SimpleQueue[tuple[int, Future[T]]]") -> None:
        while True:
            self._read(*wanted.get())

    def _read(self, number: int, future: "Future[T]") -> None:
        """Whoever is first reads; the others wait for the result."""
        with self._lock:
            if future.running() or future.done():
                return
            future.set_running_or_notify_cancel()
        try:
            future.set_result(self.opened(number))
        except BaseException as error:
            future.set_exception(error)
