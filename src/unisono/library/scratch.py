"""A folder to play a script in: it reads the files of its own folder there, and what it writes goes when it ends."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MOST = 5000  # entries that are mirrored one by one; a folder beyond is a link
SMALL = 1 << 18  # bytes of a file that is copied; a larger one is a link
ROOM = 64 << 20  # bytes of all copies
_NAME = "unisono-prove-"


@contextmanager
def mirror(folder: Path) -> Iterator[Path]:
    """The current folder while this lasts: as `folder`, with copies of small files and links to others. What is new,
    removed or renamed leaves `folder` as it was, also in folders that are there; and so does what is written in place,
    unless it is large."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix=_NAME) as name:
        _link(folder, Path(name))
        os.chdir(name)
        try:
            yield Path(name)
        finally:
            os.chdir(before)


def _link(folder: Path, into: Path) -> None:
    """Breadth first, so that it is the deep folders that are left whole."""
    waiting, made, room = [(folder, into)], 0, ROOM
    while waiting:
        source, target = waiting.pop(0)
        target.mkdir(exist_ok=True)
        for entry in os.scandir(source):
            if entry.name.startswith(_NAME):  # such a folder, in a folder for temporary ones
                continue
            made += 1
            plain = made <= MOST and not entry.is_symlink() and os.access(entry.path, os.R_OK)
            if plain and entry.is_dir() and not entry.name.startswith("."):
                waiting.append((Path(entry.path), target / entry.name))
            elif plain and entry.is_file() and entry.stat().st_size <= min(SMALL, room):
                room -= entry.stat().st_size
                shutil.copy2(entry.path, target / entry.name)
            else:
                os.symlink(os.path.abspath(entry.path), target / entry.name)
