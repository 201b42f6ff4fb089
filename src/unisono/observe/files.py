"""Files that are whole or absent, also after a power cut: written aside, flushed to the disk, then renamed."""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replaced(path: str | Path) -> Iterator[Path]:
    """A path beside `path` to write to; what is there at the end becomes `path` at once. Raises OSError.

    with replaced(out / "model.safetensors") as aside: save_file(tensors, aside)
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        yield aside
        _sync(aside, os.O_RDWR)
        os.replace(aside, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(aside)
        raise
    sync_folder(target.parent)


def write_whole(path: str | Path, content: bytes | str) -> Path:
    """Replace `path` by `content` at once, so that a reader never meets half a file. Raises OSError."""
    with replaced(path) as aside:
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            write_all(fd, content.encode() if isinstance(content, str) else content)
        finally:
            os.close(fd)
    return Path(path)


def whole_file(path: str | Path) -> bytes:
    """All bytes of a regular file. Raises OSError, also for a pipe in the place of one, which would be waited for."""
    file = Path(path)
    if file.exists() and not file.is_file():
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return file.read_bytes()


@contextmanager
def filled(folder: str | Path, old: Sequence[str] = ()) -> Iterator[Path]:
    """A folder to write files to. At its end they are renamed into `folder`, and what else there matches the globs
    `old` goes. If anything is raised before, `folder` is as it was: absent if it was. Raises OSError.

    with filled(out, ["model*.safetensors"]) as aside: export(aside)
    """
    target = Path(folder)
    missing = [path for path in (target, *target.parents) if not path.exists()]
    aside = target / f".{os.getpid()}.part"
    try:
        aside.mkdir(parents=True)
        yield aside
        names = {path.name for path in aside.iterdir()}
        for path in aside.iterdir():
            os.replace(path, target / path.name)
        aside.rmdir()
        for path in [
            leftover for glob in old for leftover in target.glob(glob) if leftover.name not in names
        ]:
            path.unlink()
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        for path in missing:
            with suppress(OSError):  # somebody has put something there meanwhile
                path.rmdir()
        raise
    sync_folder(target)


def write_all(fd: int, data: memoryview | bytes) -> None:
    """Write every byte. One `os.write` may take fewer (Linux stops at 2 GiB). Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def lock_now(file: int) -> bool:
    """Lock an open file or folder until it is closed, without waiting. Return False if another process holds the lock,
    and True also if the file system knows no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


class Appender:
    """Appends to a file, each time all or nothing, straight to the system: a disk that is full for a while
    leaves no half of a line, and nothing that would come twice. Raises OSError."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd: int | None = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"  # by a run that was killed

    def append(self, lines: bytes) -> None:
        """Whole lines. What half a line was left before them is closed first, so that it spoils only itself."""
        if self._fd is None:
            raise ValueError("the file is closed")
        before = os.fstat(self._fd).st_size
        try:
            write_all(self._fd, b"\n" + lines if self._torn else lines)
            self._torn = False
        except OSError:
            try:
                os.ftruncate(self._fd, before)
            except OSError:
                self._torn = True
            raise

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None


def sync_folder(folder: Path) -> None:
    """Make names created, renamed or removed in `folder` survive a power cut. Raises OSError."""
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    fd = os.open(path, flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
