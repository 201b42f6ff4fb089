"""Paths as users write them: what is there is taken as it is, before `~`, `*` or a comma in it means anything."""

import os
import re
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from glob import escape, has_magic, iglob
from pathlib import Path

_OPTION = re.compile(r"[,:](?=[A-Za-z_]\w*=)")
_MISSPELT = (
    0.7  # how near a name is to an option's, from which on it is meant: `date=` in a path is not `path=`
)
_SPLITS = 64  # places in a text at which options are looked for
FOREIGN = "is not UTF-8, and recipes and runs are"
RENAMED = "a name in UTF-8, or a link that has one: ln -s OLD NEW"


def foreign(word: str) -> bool:
    """Whether it is not UTF-8: Python shows such bytes as halves of letters."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return True
    return False


def bytes_of(word: str) -> bytes:
    """The bytes of a word: those that Python shows as halves of letters as they came, other halves as UTF-8 would have
    them, which no system hands over."""
    try:
        return os.fsencode(word)
    except UnicodeEncodeError:
        return word.encode("utf-8", "surrogatepass")


def at_home(path: str) -> Path:
    """The path; a `~` at its beginning is a home, unless there is something of that name."""
    if not path.startswith("~") or os.path.lexists(path):
        return Path(path)
    return Path(os.path.expanduser(path))  # one that nobody has stays


def matching(path: str) -> list[str]:
    """The files and folders that a pattern means, in their order."""
    return sorted(_meant(path))


def names_something(path: str) -> bool:
    """Whether something is there, or a pattern means something."""
    return bool(path) and next(_meant(path), None) is not None


def _meant(path: str) -> Iterator[str]:
    """Letters of a pattern in the name of a folder that is there stand for themselves."""
    whole = at_home(path)
    if os.path.lexists(whole):
        yield str(whole)
    elif has_magic(str(whole)) and "\0" not in path:
        place, rest = Path(), [*whole.parts]
        while len(rest) > 1 and os.path.isdir(place / rest[0]):
            place /= rest.pop(0)
        yield from iglob(
            os.path.join(escape(str(place)), *rest) if place.parts else str(whole), recursive=True
        )


def parted(text: str, options: Collection[str]) -> tuple[str, str]:
    """(path, the options behind it) of `PATH,key=value` or `PATH:key=value`. As much is the path as is there; where
    nothing is, what stands before the first of these options, or of one that is misspelt."""
    ends = [match.start() for match in _OPTION.finditer(text)][-_SPLITS:]
    there = next((at for at in (len(text), *reversed(ends)) if names_something(text[:at])), None)
    known = (at for at in ends if get_close_matches(text[at + 1 :].partition("=")[0], options, 1, _MISSPELT))
    at = next(known, len(text)) if there is None else there
    return text[:at], text[at + 1 :]


def file_and_name(text: str) -> tuple[str, str] | None:
    """(`FILE.py`, what stands behind its colon) of `FILE.py:NAME...`: up to the first `.py:` before which there is a
    file, or else the first. None where there is no `.py:`."""
    ends = [match.end() - 1 for match in re.finditer(r"\.py:", text)]
    at = next((end for end in ends if os.path.isfile(text[:end])), ends[0] if ends else None)
    return None if at is None else (text[:at], text[at + 1 :])
