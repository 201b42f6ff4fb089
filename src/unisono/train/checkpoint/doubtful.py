"""What may have been written by anyone: files that must be files, and JSON that has one meaning."""

import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn


def open_regular(path: Path) -> int:
    """A descriptor to read from. Raises OSError, also for a link, which may point anywhere, and for what is no file: a
    pipe in the place of one would be waited for."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(0, "it is no regular file")
    return fd


def read_regular(path: Path, limit: int) -> bytes | None:
    """All bytes of a regular file, None if they are more than `limit`. Raises OSError."""
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        if size > limit:
            return None
        with os.fdopen(os.dup(fd), "rb") as file:
            data = file.read(size + 1)
    finally:
        os.close(fd)
    return data if len(data) <= size else None  # it grows as it is read


def parse(text: bytes) -> Any:
    """The JSON value. Raises ValueError or RecursionError, also for a key that is given twice (readers would choose
    differently) and for NaN and infinities, which are no JSON."""
    return json.loads(text, object_pairs_hook=_object, parse_constant=_no_number)


def plain(text: str, limit: int = 300) -> str:
    """The text as one short line that any terminal and any file can take, whoever chose it."""
    shown = text if len(text) <= limit else f"{text[:limit]}..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:80]!r} is given twice")
    return made


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")
