"""A folder of files that were made once: found by what went in, made under a lock, there all at once or not at all."""

import errno
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from unisono.spec.errors import UsageError
from unisono.spec.paths import at_home

META = "meta.json"
_PAGES, _PAGE = 64, 4096  # of each file, what is read for its identity
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EFBIG)


def identity(path: Path) -> list[Any]:
    """What a file is known by: path, size, time of its last change, and a hash of pages spread over it."""
    stat, digest = path.stat(), blake2b(digest_size=16)
    with path.open("rb") as file:
        for start in sorted(
            set(np.linspace(0, max(0, stat.st_size - _PAGE), _PAGES).astype(np.int64).tolist())
        ):
            file.seek(start)
            digest.update(file.read(_PAGE))
    return [str(path.absolute()), stat.st_size, stat.st_mtime_ns, digest.hexdigest()]


def kept(
    cache: str,
    kind: str,
    key: Mapping[str, Any],
    make: Callable[[Path], Mapping[str, Any]],
    wait: Callable[[], None],
) -> tuple[Path, dict[str, Any]]:
    """(folder, what `make` said of it) of what these facts decide. make(folder): writes into an empty folder, if nobody
    has before. wait: called once if another process is making it. Raises UsageError D15 where it cannot be written."""
    folder = folder_of(cache, kind, key)
    place = folder.parent
    if not os.path.exists(folder / META):  # whatever keeps one from looking
        with writable(place):
            place.mkdir(parents=True, exist_ok=True)
            with _alone(place / f"{folder.name}.lock", wait) as is_alone:
                if not (folder / META).exists():
                    _build(folder, make, is_alone)
    return folder, json.loads((folder / META).read_text())


def folder_of(cache: str, kind: str, key: Mapping[str, Any]) -> Path:
    """Where `kept` keeps what these facts decide; it is whole if META is in it."""
    digest = blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=12).hexdigest()
    return at_home(cache) / f"{kind}-{digest}"


def _build(folder: Path, make: Callable[[Path], Mapping[str, Any]], is_alone: bool) -> None:
    for stale in (
        folder.parent.glob(f"{folder.name}.tmp-*") if is_alone else ()
    ):  # of processes that were killed
        shutil.rmtree(stale, ignore_errors=True)
    under_way = folder.with_name(
        f"{folder.name}.tmp-{secrets.token_hex(8)}"
    )  # hosts may have one number twice
    try:
        under_way.mkdir()
        meta = make(under_way)
        with (under_way / META).open("w") as file:
            json.dump(meta, file)
            file.flush()
            os.fsync(file.fileno())
        _put_there(under_way, folder)
    finally:
        shutil.rmtree(under_way, ignore_errors=True)


def _put_there(temporary: Path, folder: Path) -> None:
    """Rename, unless another process has been sooner: what went in is the same, so is what came out."""
    try:
        temporary.rename(folder)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY) or not (folder / META).exists():
            raise


@contextmanager
def _alone(path: Path, wait: Callable[[], None]) -> Iterator[bool]:
    """While it lasts, no other process makes the same; whether that is sure. A file system without locks lets several
    make it: those that are later find the folder there."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield False
            return
        yield True


@contextmanager
def writable(place: Path) -> Iterator[None]:
    """Failures to write there as a UsageError D15."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL and not _leads_to(error.filename, place):
            raise
        raise unwritable(place, error.strerror or str(error)) from error


def _leads_to(name: Any, place: Path) -> bool:
    """Whether it was the folder itself, or one above it, that the system refused."""
    return isinstance(name, str) and Path(name) in (place, *place.parents)


def unwritable(place: Path, why: str) -> UsageError:
    """The error for a cache that takes nothing."""
    return UsageError(
        f"the cache of data cannot be written: {why}",
        code="D15",
        where=str(place),
        likely="the disk is full, the folder is somebody else's, or HOME is none; nothing half-written was left there",
        fix="data.cache = FOLDER, one with room",
    )


def joined(parts: Sequence[Path], out: Path) -> None:
    """Files one behind the other, which are gone after."""
    with out.open("wb") as whole:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, whole, 1 << 22)
            part.unlink()
