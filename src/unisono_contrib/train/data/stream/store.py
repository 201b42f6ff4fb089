"""Where shards lie: a folder, or whatever fsspec knows by its URL; read by stretches of bytes, with patience. No torch.

A request that fails is made again, with pauses that double, until a deadline. What cannot get better by waiting is an
error at once: a shard that is not there, or that nobody may read.
"""

import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from unisono.spec.errors import UsageError
from unisono.spec.paths import at_home, matching
from unisono.train.data.documents import existing, unreadable
from unisono_contrib.comm.depot import bare

T = TypeVar("T")
_BLOCK = 8 << 20  # bytes of one request while a shard is read from its beginning to its end
_BLOCKS = 3  # that are held at once
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0  # seconds
_BRACES = re.compile(r"\{([^{}]*)\}")
_NUMBERS = re.compile(r"(-?\d+)\.\.(-?\d+)$")
_MOST = 1_000_000  # shards that braces may mean


@dataclass(frozen=True, slots=True)
class ShardStore:
    """How shards are reached. patience: seconds after which a request that fails is given up."""

    patience: float = 60.0

    def size(self, path: str) -> int:
        """Bytes of a shard. Raises UsageError D02, D03, D18."""
        return int(self.identity(path)[0])

    def identity(self, path: str) -> list[Any]:
        """What a shard is known by before it is read: its size, and the store's tag or the time of its last change.
        Raises UsageError D02, D03, D18."""
        if not is_remote(path):
            stat = self._tried(path, lambda: os.stat(path))
            return [stat.st_size, str(stat.st_mtime_ns)]

        def inquire() -> list[Any]:
            system, place = _opened(path)
            system.invalidate_cache()
            info = system.info(place)
            tags = (info.get(key) for key in ("ETag", "etag", "md5Hash", "LastModified", "mtime", "created"))
            return [int(info["size"]), str(next((tag for tag in tags if tag), ""))]

        return self._tried(path, inquire)

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` of a shard; fewer where it ends before. Raises UsageError D02, D03, D18."""
        if is_remote(path):
            return self._tried(
                path, lambda: _opened(path)[0].cat_file(_opened(path)[1], start=start, end=stop)
            )

        def read() -> bytes:
            with open(path, "rb") as file:
                file.seek(start)
                return file.read(stop - start)

        return self._tried(path, read)

    def read_unchanged(self, path: str, identity: Sequence[Any], start: int, stop: int) -> bytes:
        """Bytes of a local shard that is still what `identity` said. Raises UsageError D02, D03, D19."""

        def read() -> bytes:
            with open(path, "rb", buffering=0) as file:
                stat = os.fstat(file.fileno())
                if [stat.st_size, str(stat.st_mtime_ns)] != list(identity):
                    raise changed(path, "its size or the time of its last change is another")
                body = os.pread(file.fileno(), stop - start, start)
            if len(body) != stop - start:
                raise changed(path, "it is shorter than it was")
            return body

        return self._tried(path, read)

    def expanded(self, pattern: str) -> list[str]:
        """The shards that braces (`{000..049}`, `{a,b}`), `*`, or a folder mean, in order. Raises UsageError D02."""
        shards: list[str] = []
        for path in braced(pattern):
            if is_remote(path):
                shards += self._tried(path, lambda path=path: _matching(path)) if "*" in path else [path]
            elif at_home(path).is_dir():
                shards += [str(at_home(path))]
            else:
                shards += matching(path) if "*" in path else [str(existing(path))]
        if not shards:
            raise UsageError(
                f"no shard is called {bare(pattern)}",
                code="D02", where="data.source", fix="{000..049} for numbers, * for anything; in a shell in '...'",
            )  # fmt: skip
        return shards

    def _tried(self, path: str, ask: Callable[[], T]) -> T:
        begun, pause = time.monotonic(), _FIRST_PAUSE
        while True:
            try:
                return ask()
            except (UsageError, MemoryError):
                raise
            except FileNotFoundError as error:
                raise UsageError(
                    f"there is no shard {bare(path)}",
                    code="D02", where=bare(path), fix="the shards that data.source names, all of them",
                ) from error  # fmt: skip
            except (PermissionError, IsADirectoryError, NotADirectoryError) as error:
                raise unreadable(Path(bare(path)), error) from error
            except Exception as error:  # each library has errors of its own
                if time.monotonic() - begun + pause > self.patience:
                    raise _out_of_patience(path, error, time.monotonic() - begun) from error
                time.sleep(
                    pause * (0.5 + random.random() / 2)
                )  # ranks that failed together do not ask together
                pause = min(2 * pause, _LONGEST_PAUSE)


def _out_of_patience(path: str, error: Exception, seconds: float) -> UsageError:
    return UsageError(
        f"a shard could not be read for {seconds:.1f} s: {type(error).__name__}: {str(error)[:200]}",
        code="D18",
        where=bare(path),
        likely="the store is overloaded or cannot be reached",
        fix="resume when it can; `patience=SECONDS` behind data.source waits longer",
    )


def changed(path: str, why: str) -> UsageError:
    """The error for a shard that is no longer what was indexed."""
    return UsageError(
        f"a shard has changed since it was indexed: {why}",
        code="D19",
        where=bare(path),
        likely="it was written anew while the run went on",
        fix="the shard as it was, for the same run; or a new run, which indexes it anew",
    )


def damaged(path: str, offset: int, why: str) -> UsageError:
    """The error for a sample that cannot be read, named by shard and byte (of a table: row)."""
    return UsageError(
        f"a bad sample: {why}",
        code="D14",
        where=f"{bare(path)}:{offset}",
        fix="mend the shard, or data.skip_bad = true, which leaves such samples out and counts them",
    )


def is_remote(path: str) -> bool:
    """Whether fsspec is to read it."""
    return "://" in path


def braced(pattern: str) -> list[str]:
    """All names that braces mean: `{08..11}` counts with leading zeros, `{a,b}` lists."""
    pieces = _BRACES.split(pattern)  # text, inside, text, inside, ... text
    choices = [[piece] if i % 2 == 0 else _choices(piece) for i, piece in enumerate(pieces)]
    count = 1
    for each in choices:
        count *= len(each)
    if count > _MOST:
        raise UsageError(
            f"{pattern} means {count:,} shards", code="C06", where="data.source", fix=f"at most {_MOST:,}"
        )
    return ["".join(parts) for parts in product(*choices)]


def _choices(inside: str) -> list[str]:
    numbers = _NUMBERS.match(inside)
    if numbers is None:
        return inside.split(",") if "," in inside else [f"{{{inside}}}"]
    first, last = int(numbers[1]), int(numbers[2])
    width = max(map(len, numbers.groups())) if "0" in (numbers[1][0], numbers[2][0]) else 0
    count = range(first, last + 1) if last >= first else range(first, last - 1, -1)
    return [f"{n:0{width}d}" for n in count[: _MOST + 1]]


def _opened(path: str) -> tuple[Any, str]:
    """(file system, path in it). fsspec keeps one system for each kind of options. Raises UsageError E01, C02."""
    try:
        from fsspec.core import url_to_fs

        return url_to_fs(path)
    except ImportError as error:
        raise UsageError(
            f"{bare(path)} needs a module that is not installed: {error}",
            where="data.source", fix="pip install 'unisono[remote]', and what fsspec names for this URL", code="E01",
        ) from error  # fmt: skip
    except ValueError as error:
        raise UsageError(
            f"no place is named {bare(path)}: {error}",
            where="data.source", fix="a folder, or a URL that fsspec knows: s3://bucket/{000..049}.tar", code="C02",
        ) from error  # fmt: skip


def _matching(path: str) -> list[str]:
    system, place = _opened(path)
    system.invalidate_cache()
    return [system.unstrip_protocol(name) for name in sorted(system.glob(place))]


@dataclass(slots=True)
class ShardReader:
    """A shard from its beginning to its end, a block a request. What was read lately is at hand: who reads a stretch a
    second time asks the store once."""

    store: ShardStore
    path: str
    size: int
    _blocks: dict[int, bytes] = field(default_factory=dict)

    def read(self, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop`, or to the end of the shard."""
        stop = min(stop, self.size)
        blocks = [self._block(i) for i in range(start // _BLOCK, -(-stop // _BLOCK))]
        if len(blocks) == 1:
            return blocks[0][start % _BLOCK : start % _BLOCK + stop - start]
        begin = start // _BLOCK * _BLOCK
        return b"".join(blocks)[start - begin : stop - begin] if stop > start else b""

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            stop = min((number + 1) * _BLOCK, self.size)
            self._blocks[number] = self.store.read(self.path, number * _BLOCK, stop)
            if len(self._blocks[number]) != stop - number * _BLOCK:
                raise changed(self.path, "it is shorter than it was")
            while len(self._blocks) > _BLOCKS:
                del self._blocks[min(self._blocks)]
        return self._blocks[number]


def lines_at(reader: ShardReader, start: int) -> Iterator[int]:
    """Where lines end behind `start`: the byte after each newline that is looked for, then the end of the shard."""
    at = start
    while at < reader.size:
        piece = reader.read(at, at + (1 << 16))
        found_at = piece.find(b"\n")
        if found_at >= 0:
            yield at + found_at + 1
            return
        at += len(piece)
    yield reader.size


def stretches(ends: Sequence[int], most: int) -> list[range]:
    """Neighbouring samples in parts of about `most` bytes. ends: [0, end of the first sample, ...]."""
    parts, first = [], 0
    for i in range(1, len(ends)):
        if ends[i] - ends[first] >= most or i == len(ends) - 1:
            parts.append(range(first, i))
            first = i
    return parts
