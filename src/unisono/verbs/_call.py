"""What the verbs of the command line share: how a call looks, how arguments are read, how one JSON object is made."""

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from unisono.spec.errors import UsageError


@dataclass(slots=True)
class Call:
    """One invocation. `options` is handed to the verb's command, which may put `run_dir` into it once there is one."""

    words: Sequence[str]
    environ: Mapping[str, str]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def json(self) -> bool:
        return "--json" in self.words

    @property
    def quiet(self) -> bool:
        return "--quiet" in self.words

    def say(self, text: str = "") -> None:
        """A line of data for people; with --json, stdout belongs to the object."""
        if not self.json:
            print(text)

    def note(self, text: str) -> None:
        """A line of progress."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Verb:
    """A word of the command line.

    run: gets the call and the words after the verb; returns the object of `--json` (without schema_version) or None.
    failed: exit code for an object that says that something did not pass.
    """

    name: str
    summary: str
    parser: Callable[[], "Parser"]
    run: Callable[[Call, list[str]], Mapping[str, Any] | None]
    failed: int = 0


class Parser(argparse.ArgumentParser):
    """argparse whose mistakes are errors of ours, with the nearest flag."""

    def __init__(self, **given: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **given)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, where=self.prog, fix=f"{self.prog} --help", code="C04")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Parses; an unknown flag is answered with the nearest one. Raises UsageError."""
        found, left = self.parse_known_args(list(words))
        if not left:
            return found
        flags = [name for action in self._actions for name in action.option_strings]
        word = left[0].partition("=")[0]
        close = get_close_matches(word, flags, n=1, cutoff=0.6)
        hint = f"; did you mean {close[0]}?" if close else ""
        kind = "flag" if word.startswith("-") else "argument"
        raise UsageError(
            f"unknown {kind} {word}{hint}", where=self.prog, fix=f"{self.prog} --help", code="C04"
        )


def common(parser: Parser) -> Parser:
    """Adds the flags that every verb takes."""
    parser.add_argument("--json", action="store_true", help="exactly one JSON object on stdout")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    parser.add_argument("--no-color", action="store_true", help="no colours (so does NO_COLOR)")
    parser.add_argument("--dry-run", action="store_true", help="print exactly what would run")
    return parser


def colour(call: Call) -> bool:
    """Whether progress may be coloured: a terminal, and nobody against it."""
    refused = "--no-color" in call.words or call.environ.get("NO_COLOR") or call.environ.get("TERM") == "dumb"
    return not refused and sys.stderr.isatty()


def found_run(name: str) -> Path:
    """The run folder that `name` means: itself, or the latest when it is the folder of a recipe's runs.

    Raises UsageError.
    """
    path = Path(name)
    if not path.is_dir():
        near = get_close_matches(path.name, _folders(path.parent), n=1, cutoff=0.5)
        fix = f"did you mean {path.with_name(near[0])}?" if near else "name a folder like runs/NAME/ID"
        raise UsageError(f"no such run folder: {name}", where=name, fix=fix, code="C03")
    if (path / "config.resolved.toml").is_file():
        return path
    with contextlib.suppress(OSError):
        latest = path / (path / "latest").read_text(encoding="utf-8").strip()
        if (latest / "config.resolved.toml").is_file():
            return latest
    runs = [p for p in path.iterdir() if (p / "config.resolved.toml").is_file()]
    if runs:
        return max(runs, key=lambda p: (p / "config.resolved.toml").stat().st_mtime)
    raise UsageError(
        f"{name} is no run folder: config.resolved.toml is missing",
        where=name,
        fix="name a folder like runs/NAME/ID",
        code="C03",
    )


def _folders(parent: Path) -> list[str]:
    try:
        return [p.name for p in parent.iterdir() if p.is_dir()]
    except OSError:
        return []


def one_object(result: Mapping[str, Any]) -> str:
    """The line that `--json` prints; numbers that JSON has no word for become null."""
    return json.dumps(_plain({"schema_version": 1, **result}), allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)
