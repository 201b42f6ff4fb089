"""What may have been written by anyone: files that must be files, JSON that has one meaning, words for a terminal."""

import errno
import json
import os
import re
import stat
import tomllib
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Kinds of letters that steer a terminal, turn its text around or cannot be written: never shown as they are."""


TEXT = 1 << 20
"""Bytes of a text that somebody wrote by hand; a longer one is something else."""
LARGEST = 1e30
"""A number that somebody wrote by hand, in whatever unit: products of some of them are still numbers."""
_DEEPEST = 64  # tables within tables: Python's reader takes the square of that, or more than its stack has
_TOKEN = re.compile(
    r'''"""(?:[^\\"]|\\.|"(?!""))*+(?:""")?|\'\'\'(?:[^']|'(?!''))*+(?:\'\'\')?'''
    r"""|"(?:[^"\\\n]|\\.)*+"?|'[^'\n]*+'?|\#[^\n]*+|[A-Za-z0-9_-]++|[\[\]{}.]|[^\s]|\n""",
    re.DOTALL,
)


def open_regular(path: str | Path, follow: bool = False) -> int:
    """A descriptor to read from. Raises OSError for what is no file: a pipe in the place of one would be waited for, a
    device has no end. A link, which may point anywhere, is none either, unless `follow`."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    if not stat.S_ISREG(mode := os.fstat(fd).st_mode):
        os.close(fd)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "it is a pipe or a device, no regular file", str(path))
    return fd


def read_regular(path: str | Path, limit: int, follow: bool = False) -> bytes | None:
    """All bytes of a regular file, None if they are more than `limit`. Raises OSError."""
    fd = open_regular(path, follow)
    try:
        size = os.fstat(fd).st_size
        if size > limit:
            return None
        with os.fdopen(os.dup(fd), "rb") as file:
            data = file.read(size + 1)
    finally:
        os.close(fd)
    return data if len(data) <= size else None  # it grows as it is read


def read_text(path: str | Path, limit: int) -> str:
    """The text of a file that a user names, a link or not. Raises OSError, also for one of more than `limit` bytes, and
    UnicodeDecodeError. The mark that editors put before UTF-8 is no part of it."""
    data = read_regular(path, limit, follow=True)
    if data is None:
        raise OSError(errno.EFBIG, f"more than {limit} bytes are too many", str(path))
    return data.decode("utf-8-sig").replace("\r\n", "\n")


def parse(text: bytes) -> Any:
    """The JSON value of a text in UTF-8. Raises ValueError or RecursionError, also for a key that is given twice (which
    readers would take in different ways) and for NaN and infinities, which are no JSON."""
    return json.loads(text.decode(), object_pairs_hook=keys_once, parse_constant=_no_number)


def toml_of(text: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises tomllib.TOMLDecodeError, also for what is deeper than anybody means."""
    if text.count(".") + text.count("[") + text.count("{") > _DEEPEST:
        _check_depth(text)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; a date that never was
        raise tomllib.TOMLDecodeError(f"{str(error).partition(';')[0]} (at end of document)") from error


def _check_depth(text: str) -> None:
    line, depth, dots, after_dot = 1, 0, 0, True
    for mark in _TOKEN.finditer(text):
        token = mark[0]
        if token == ".":
            dots, after_dot = dots + 1, True
            if dots > _DEEPEST:
                raise tomllib.TOMLDecodeError(f"A key of too many parts (at line {line}, column 1)")
            continue
        if not after_dot:
            dots = 0
        after_dot = False
        depth = max(0, depth + (token in "[{") - (token in "]}"))
        if depth > _DEEPEST:
            raise tomllib.TOMLDecodeError(f"Values within values, too deep (at line {line}, column 1)")
        line += token.count("\n")


def plain(text: str, limit: int = 300) -> str:
    """The text as one short line that any terminal and any file can take, whoever chose it."""
    shown = text if len(text) <= limit else f"{text[:limit]}..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def visible(text: str) -> str:
    """The text with what no reader would see written out: `\\x1b` for an escape, which a terminal would obey."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c.encode("unicode_escape").decode() if c not in "\n\t" and unicodedata.category(c) in _UNSEEN else c
        for c in text
    )


def keys_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, as `json.loads` asks its `object_pairs_hook`. Raises ValueError where a key is given twice."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        raise ValueError(f"the key {twice[:80]!r} is given twice")
    return mapping


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")
