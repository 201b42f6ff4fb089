"""Where copies of checkpoints go: a folder, or whatever fsspec knows (object stores, other hosts), by its URL.

    depot_at("/mnt/backup")   depot_at("file:///mnt/backup")   depot_at("s3://bucket/runs")

fsspec is drawn in for the last kind alone: `pip install unisono[remote]`.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, final
from urllib.parse import unquote, urlsplit

from unisono.observe.files import replaced
from unisono.spec.errors import UsageError

_CHUNK = 4 << 20  # bytes

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


def depot_at(url: str) -> Depot:
    """Raises UsageError: E01 without a library that it takes, C02 for a URL that means nothing."""
    if "://" not in url:
        return FolderDepot(Path(url))
    if url.startswith("file://"):
        return FolderDepot(Path(unquote(urlsplit(url).path)))
    try:
        from fsspec.core import url_to_fs

        return RemoteDepot(*url_to_fs(url))
    except ImportError as error:
        raise UsageError(
            f"copies to {bare(url)} need a module that is not installed: {error}",
            where="train.mirror",
            fix="pip install 'unisono[remote]', and what fsspec names for this kind of URL",
            code="E01",
        ) from error
    except ValueError as error:
        raise UsageError(
            f"no place for copies is named {bare(url)}: {error}",
            where="train.mirror",
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
        where = f"{self._root}/{path}"
        self._system.makedirs(where.rpartition("/")[0], exist_ok=True)
        with self._system.open(where, "wb") as file:
            _pour(source, file, moved)

    def get(self, path: str, target: BinaryIO, limit: int, moved: Moved) -> None:
        with self._system.open(f"{self._root}/{path}", "rb") as file:
            _pour(file, target, moved, limit)

    def drop(self, path: str) -> None:
        where = f"{self._root}/{path}"
        self._system.rm_file(where) if self._system.isfile(where) else self._system.rmdir(where)


def _pour(source: Any, target: Any, moved: Moved, limit: int | None = None) -> None:
    count = 0
    while chunk := source.read(_CHUNK):
        count += len(chunk)
        if limit is not None and count > limit:
            raise ValueError(f"there are more than the {limit} bytes that were written")
        target.write(chunk)
        moved(len(chunk))
