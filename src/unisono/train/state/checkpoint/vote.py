"""How the ranks of one save learn of each other without a collective: files in the folder that they all write to.

A rank announces itself by `rank-00000.writing`, filled with spaces. Done: it adds its marker `rank-00000.json`. Failed:
it writes why over the spaces and renames to `rank-00000.failed`; neither step needs a free block, so this works on a
full disk too. Works from any thread and on any shared file system, and needs no process group that training could
be using at the same time.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from unisono.observe.files import write_all

_ROOM = 2048  # bytes reserved for the reason of a failure


class PeerFailed(Exception):
    """Another rank could not write its part, or was not heard of."""

    def __init__(self, reason: str, number: int | None = None, rank: int | None = None) -> None:
        super().__init__(reason)
        self.reason, self.number, self.rank = reason, number, rank


@dataclass(frozen=True)
class Vote:
    """One rank's voice in one save; `folder` is where all ranks write."""

    folder: Path
    rank: int

    def _path(self, ending: str, folder: Path | None = None) -> Path:
        return (folder or self.folder) / f"rank-{self.rank:05d}.{ending}"

    def announce(self) -> None:
        """Create the folder and this rank's sign in it. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._path("writing"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            write_all(fd, b" " * _ROOM)
        finally:
            os.close(fd)

    def fail(self, reason: str, number: int | None, rank: int, folder: Path | None = None) -> None:
        """Tell the others what went wrong on `rank`, this one or one that was heard of. Never raises: there is an error
        on its way up already, and they have a time limit."""
        text = json.dumps({"rank": rank, "reason": reason[:500], "errno": number}).encode()
        with contextlib.suppress(OSError):
            fd = os.open(self._path("writing", folder), os.O_WRONLY)
            try:
                write_all(fd, text[:_ROOM])
            finally:
                os.close(fd)
            os.replace(self._path("writing", folder), self._path("failed", folder))

    def withdraw(self, folder: Path | None = None) -> None:
        """Take the sign away: this rank is done and all is well."""
        with contextlib.suppress(OSError):
            os.unlink(self._path("writing", folder))


def raise_failures(folder: Path) -> None:
    """Raises PeerFailed if a rank said that it failed."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".failed"))
    except FileNotFoundError:  # renamed just now: whoever waits will look for the new name
        return
    for name in names:
        try:
            failure = json.loads((folder / name).read_bytes())
            raise PeerFailed(failure["reason"], failure["errno"], failure["rank"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise PeerFailed(f"{name.removesuffix('.failed')} failed") from error


def polls(
    folders: tuple[Path, ...],
    patience: float,
    waiting_for: str,
    given_up: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Yield again and again, less and less often, while anything in `folders` still grows or appears.

    Raises PeerFailed once nothing has changed for `patience` seconds, or when it is `given_up`.
    """
    pause, seen, since = 0.002, [(-1, -1)], time.monotonic()
    while True:
        yield
        if given_up():
            raise PeerFailed("another rank could not write its part")
        now = [_growth(folder) for folder in folders]
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > patience:
            raise PeerFailed(
                f"nothing was heard of {waiting_for} for {patience:g} s (can all hosts see {folders[0].parent}?)"
            )
        time.sleep(pause)
        pause = min(pause * 1.5, 0.25)


def _growth(folder: Path) -> tuple[int, int]:
    count = size = 0
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            count, size = count + 1, size + entry.stat().st_size
    return count, size
