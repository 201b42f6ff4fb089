"""Where files lie that others read: a folder, or whatever fsspec knows (object stores, other hosts), by its URL.

    depot_at("/mnt/backup")   depot_at("file:///mnt/backup")   depot_at("s3://bucket/runs")

fsspec is drawn in for the last kind alone: `pip install unisono[remote]`.
"""

import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, final
from urllib.parse import unquote, urlsplit

from unisono.observe.files import replaced
from unisono.spec.errors import UsageError

_CHUNK = 4 << 20  # bytes
_TOO_MANY = "there are more than the {} bytes that were written"

Moved = Callable[[int], None]  # hears of bytes that went by


class Depot(ABC):
    """Paths are relative, with slashes. What goes wrong may raise anything: each library has errors of its own."""

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """What lies in a folder; nothing if it is not there."""

    @abstractmethod
    def put(self, source: BinaryIO, path: str, moved: Moved) -> None:
        """A file, whole or absent, in the place of what was there."""

    @abstractmethod
    def get(self, path: str, target: BinaryIO, limit: int, moved: Moved) -> None:
        """A file's bytes. Raises ValueError if there are more than `limit`."""

    @abstractmethod
    def drop(self, path: str) -> None:
        """Remove a file or an empty folder."""

    @abstractmethod
    def create(self, path: str, content: bytes) -> bool:
        """A file, whole or absent, where there is none; whether it is this one. Of several at once one succeeds, if the
        system has exclusive creation, as folders and S3 have."""

    def write(self, path: str, content: bytes) -> None:
        """`put` of bytes."""
        self.put(BytesIO(content), path, _nobody)

    def read(self, path: str, limit: int) -> bytes:
        """`get` of bytes. Raises FileNotFoundError."""
        content = BytesIO()
        self.get(path, content, limit, _nobody)
        return content.getvalue()


def _nobody(count: int) -> None:
    """Hears of bytes that go by, and does nothing."""


def depot_at(url: str, key: str) -> Depot:
    """key: the option that named it, for errors. Raises UsageError: E01 without a library that it takes, C02 for a URL
    that means nothing."""
    if "://" not in url:
        return FolderDepot(Path(url))
    if url.startswith("file://"):
        return FolderDepot(Path(unquote(urlsplit(url).path)))
    try:
        from fsspec.core import url_to_fs

        return RemoteDepot(*url_to_fs(url))
    except ImportError as error:
        raise UsageError(
            f"{bare(url)} needs a module that is not installed: {error}",
            where=key,
            fix="pip install 'unisono[remote]', and what fsspec names for this kind of URL",
            code="E01",
        ) from error
    except ValueError as error:
        raise UsageError(
            f"no place is named {bare(url)}: {error}",
            where=key,
            fix="a folder, or a URL that fsspec knows: s3://bucket/folder",
            code="C02",
        ) from error


def bare(url: str) -> str:
    """The URL without a password."""
    scheme, mark, rest = url.partition("://")
    place, slash, path = rest.partition("/")
    return f"{scheme}{mark}{place.rpartition('@')[2]}{slash}{path}" if mark else url


@final
class FolderDepot(Depot):
    """A folder of this system, another disk or a network's."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(self._root / folder))
        except FileNotFoundError:
            return []

    def put(self, source: BinaryIO, path: str, moved: Moved) -> None:
        with replaced(self._root / path) as aside, aside.open("wb") as file:
            _pour(source, file, moved)

    def get(self, path: str, target: BinaryIO, limit: int, moved: Moved) -> None:
        with (self._root / path).open("rb") as file:
            _pour(file, target, moved, limit)

    def drop(self, path: str) -> None:
        where = self._root / path
        where.rmdir() if where.is_dir() else where.unlink()

    def create(self, path: str, content: bytes) -> bool:
        where = self._root / path
        where.parent.mkdir(parents=True, exist_ok=True)
        # A name of its own: threads of one process may try at once.
        with tempfile.NamedTemporaryFile(dir=where.parent, prefix=f".{where.name}.", suffix=".part") as aside:
            aside.write(content)
            aside.flush()
            os.fsync(aside.fileno())
            try:
                os.link(aside.name, where)
            except FileExistsError:
                return False
        return True


@final
class RemoteDepot(Depot):
    """What fsspec reaches. Most stores show an object when all of it is there; for others the manifest comes last."""

    def __init__(self, system: Any, root: str) -> None:
        self._system, self._root = system, root.rstrip("/")

    def names(self, folder: str) -> list[str]:
        self._system.invalidate_cache()
        try:
            paths = self._system.ls(f"{self._root}/{folder}", detail=False)
        except FileNotFoundError:
            return []
        return sorted({str(name).rstrip("/").rpartition("/")[2] for name in paths} - {""})

    def put(self, source: BinaryIO, path: str, moved: Moved) -> None:
        with self._system.open(self._folder_of(path), "wb") as file:
            _pour(source, file, moved)

    def get(self, path: str, target: BinaryIO, limit: int, moved: Moved) -> None:
        with self._system.open(f"{self._root}/{path}", "rb") as file:
            _pour(file, target, moved, limit)

    def drop(self, path: str) -> None:
        where = f"{self._root}/{path}"
        self._system.rm_file(where) if self._system.isfile(where) else self._system.rmdir(where)

    def create(self, path: str, content: bytes) -> bool:
        where = self._folder_of(path)
        try:
            self._system.pipe_file(where, content, mode="create")
        except FileExistsError:
            return False
        return True

    def write(self, path: str, content: bytes) -> None:
        """At once, where the system can."""
        self._system.pipe_file(self._folder_of(path), content)

    def read(self, path: str, limit: int) -> bytes:
        self._system.invalidate_cache()
        content = self._system.cat_file(f"{self._root}/{path}")
        if len(content) > limit:
            raise ValueError(_TOO_MANY.format(limit))
        return content

    def _folder_of(self, path: str) -> str:
        """The whole path, in a folder that is there."""
        where = f"{self._root}/{path}"
        with suppress(FileExistsError):
            self._system.makedirs(where.rpartition("/")[0], exist_ok=True)
        return where


def _pour(source: Any, target: Any, moved: Moved, limit: int | None = None) -> None:
    count = 0
    while chunk := source.read(_CHUNK):
        count += len(chunk)
        if limit is not None and count > limit:
            raise ValueError(_TOO_MANY.format(limit))
        target.write(chunk)
        moved(len(chunk))
