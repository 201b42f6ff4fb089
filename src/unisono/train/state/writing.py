"""Run folders that cannot be written, or gone on from: one error each for all who meet them. No torch."""

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unisono.observe.files import lock_now
from unisono.spec.errors import UsageError

_ELSEWHERE = "--out.dir FOLDER that can be written"
_FULL = "free some space, or --out.dir FOLDER on another disk"
_FORBIDDEN = ("the folder is read-only, or not yours", _ELSEWHERE)
_WHY = {
    errno.ENOSPC: ("the disk is full", _FULL),
    errno.EDQUOT: ("your quota is used up", _FULL),
    errno.ENOTDIR: ("a part of the path is a file, not a folder", _ELSEWHERE),
    errno.EFBIG: (
        "files may not be that large here",
        "ulimit -f unlimited, or another file system by --out.dir",
    ),
    errno.ENAMETOOLONG: ("a name in the path is too long", "a shorter --name or --out.dir"),
    errno.ENOENT: ("such a folder cannot be made there", _ELSEWHERE),
    errno.EROFS: _FORBIDDEN,
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
}


@contextmanager
def writing(run_dir: Path) -> Iterator[None]:
    """Around anything that writes into a run folder. Raises UsageError O01 for what the system refuses."""
    try:
        yield
    except OSError as error:
        likely, fix = _WHY.get(error.errno or 0, ("the disk or the network file system fails", _ELSEWHERE))
        raise UsageError(
            f"cannot write into the run folder: {error.strerror or error}",
            where=str(error.filename or run_dir),
            likely=likely,
            fix=fix,
            code="O01",
        ) from error


@contextmanager
def locked(run_dir: Path, patience: float = 2.0) -> Iterator[None]:
    """Hold a run folder against a second writer; the kernel lets go of it however this process ends.

    patience: seconds in which a run that was killed a moment ago may let go. Raises UsageError O02. A file system that
    knows no locks keeps nobody out.
    """
    with writing(run_dir):
        folder = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        until = time.monotonic() + patience
        while not lock_now(folder):
            if time.monotonic() > until:
                raise UsageError(
                    "another run writes into this folder",
                    where=str(run_dir),
                    likely="it was resumed twice, or its first run has not ended",
                    fix="wait for it or stop it; a new run without --resume has a folder of its own",
                    code="O02",
                )
            time.sleep(0.05)
        yield
    finally:
        os.close(folder)


def nothing_to_resume(run_dir: str, likely: str = "") -> UsageError:
    """The error of a run without a whole checkpoint."""
    return UsageError(
        "there is no whole checkpoint to go on from",
        where=run_dir,
        likely=likely or "the run ended before its first checkpoint",
        fix="start a new run without --resume",
        code="K06",
    )
