"""Reading constants from TOML: numbers with their origin, unknown keys refused with file and line."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from unisono.config.toml import key_lines, line_of
from unisono.plan.grammar import meant
from unisono.planner.source import ORIGINS, Source
from unisono.spec.doubtful import LARGEST, TEXT, read_text, toml_of
from unisono.spec.errors import UsageError

_FIELDS = ("value", "origin", "source")


@dataclass(frozen=True, slots=True)
class Table:
    """One table of a TOML text, which knows where its keys stand."""

    values: Mapping[str, Any]
    lines: Mapping[tuple[str, ...], int]
    path: tuple[str, ...]
    name: str

    def where(self, key: str = "") -> str:
        """FILE:LINE of a key, or of the nearest thing around it."""
        line = line_of(dict(self.lines), (*self.path, key) if key else self.path)
        return f"{self.name}:{line}" if line else self.name

    def wrong(self, what: str, key: str, fix: str) -> UsageError:
        return UsageError(what, where=self.where(key), fix=fix, code="C20")

    def known(self, keys: Sequence[str]) -> None:
        """Raises UsageError for a key that is none of these."""
        for key in self.values:
            if key not in keys:
                what = f"unknown key {key}{meant(key, keys)}"
                raise self.wrong(what, key, f"keys here: {' '.join(keys)}")

    def over(self, base: "Table") -> "Table":
        """This table where it says something, `base` elsewhere."""
        values = {key: value for key, value in self.values.items() if key != "like"}
        return Table({**base.values, **values}, self.lines, self.path, self.name)

    def table(self, key: str) -> "Table":
        inner = self.values[key]
        if not isinstance(inner, dict):
            raise self.wrong(f"{key} is a table, not a value", key, f"[{key}] on a line of its own")
        return Table(inner, self.lines, (*self.path, key), self.name)

    def tables(self, key: str) -> list["Table"]:
        inner = self.values.get(key, [])
        if not isinstance(inner, list) or not all(isinstance(item, dict) for item in inner):
            raise self.wrong(f"{key} is a list of tables", key, f"[[{key}]] for each")
        return [Table(item, self.lines, (*self.path, key), self.name) for item in inner]

    def text(self, key: str, default: str | None = None) -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self.wrong(f"{key} is {'missing' if value is None else 'not a text'}", key, f'{key} = "…"')
        return value

    def count(self, key: str, default: int) -> int:
        """A whole number, 0 or more."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.wrong(f"{key}={value!r} is not a whole number of 0 or more", key, f"{key} = 8")
        return value

    def number(self, key: str, unit: float = 1.0, default: float | None = None) -> tuple[float, Source]:
        """A constant in `unit`, and its source. Raises UsageError where it is missing, negative or no number."""
        if key not in self.values and default is not None:
            return default, Source("given", "default")
        value, source = self.constant(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LARGEST:
            raise self.wrong(
                f"{key}={value!r} is not a number of 0 or more, up to {LARGEST:g}", key, f"{key} = 1.0"
            )
        return value * unit, source

    def constant(self, key: str) -> tuple[Any, Source]:
        """A value, plain or { value, origin, source }. Raises UsageError for a missing one or a strange origin."""
        if key not in self.values:
            raise self.wrong(f"{key} is missing", "", f"{key} = …")
        value = self.values[key]
        if not (isinstance(value, dict) and "value" in value):
            return value, Source("given", f"{self.where(key)}")
        Table(value, self.lines, (*self.path, key), self.name).known(_FIELDS)
        origin = value.get("origin", "given")
        if origin not in ORIGINS:
            raise self.wrong(
                f"{key}: origin {origin!r} is not known{meant(str(origin), ORIGINS)}",
                key,
                f"one of: {', '.join(ORIGINS)}",
            )
        return value["value"], Source(origin, str(value.get("source", "")))


def parsed(text: str, name: str) -> Table:
    """A TOML text. Raises UsageError with the line of a syntax error."""
    try:
        values = toml_of(text)
    except tomllib.TOMLDecodeError as error:
        line = str(error).partition("at line ")[2].partition(",")[0]
        raise UsageError(
            f"not TOML: {str(error).partition(' (at')[0]}",
            where=f"{name}:{line}" if line.isdigit() else name,
            fix="key = value, texts in quotes",
            code="C20",
        ) from None
    return Table(values, key_lines(text), (), name)


@cache
def bundled(name: str) -> Table:
    """One of the package's own tables, read once: nobody writes to it."""
    return parsed(files("unisono.planner").joinpath("data", name).read_text(encoding="utf-8"), name)


def is_file(text: str) -> bool:
    """Whether the name of a cluster or a stack is that of a file."""
    return text.endswith(".toml") or "/" in text


def from_file(path: Path) -> Table:
    """A user's file. Raises UsageError."""
    try:
        return parsed(read_text(path, TEXT), str(path))
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a path with a zero byte
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(
            f"cannot read {path}: {reason}", where=str(path), fix="check the path", code="C03"
        ) from None


def inherited(all_of: Table, name: str) -> Table:
    """The table `name` over the one that it is `like`, so that a variant says only what differs."""
    table = all_of.table(name)
    if "like" not in table.values:
        return table
    return table.over(inherited(all_of, table.text("like")))


def likeness(table: Table, all_of: Table, kind: str) -> Table:
    """A user's table over the package's one that it is `like`. Raises UsageError where there is none of that name."""
    like = table.text("like")
    if like not in all_of.values:
        what = f"like: no {kind} is called {like!r}{meant(like, tuple(all_of.values))}"
        raise table.wrong(what, "like", f"one of: {' '.join(all_of.values)}")
    return table.over(inherited(all_of, like))
