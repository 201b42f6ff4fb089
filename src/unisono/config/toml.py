"""What tomllib does not do: say on which line a key stands, explain a fault, and write one value."""

import re
import tomllib
from typing import Any

import tomlkit

from unisono.spec.doubtful import toml_of

_PART = r"""(?:[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|'[^']*')"""
_PATH = re.compile(rf"\s*({_PART}(?:\s*\.\s*{_PART})*)\s*")
_LITERAL = re.compile(
    r'''"""(?:\\.|[^\\])*?"""|"(?:\\.|[^"\\\n])*"''' + r"""|'''.*?'''|'[^'\n]*'|\#[^\n]*""", re.DOTALL
)
"""Strings and comments."""
Path = tuple[str, ...]


def key_lines(text: str) -> dict[Path, int]:
    """Line (from 1) of every table and key of a TOML text; keys inside inline tables stand where their owner does."""
    lines: dict[Path, int] = {}
    table: Path = ()
    depth = 0  # of brackets that are open
    bare_text = _LITERAL.sub(lambda literal: "\n" * literal[0].count("\n"), text)
    for number, (line, bare) in enumerate(zip(text.split("\n"), bare_text.split("\n"), strict=True), 1):
        is_header = not depth and bare.lstrip().startswith("[")
        if is_header:
            table = _path(line.strip().lstrip("["))
            _record(lines, table, len(table) - 1, number)
        elif not depth and "=" in bare:
            _record(lines, table + _path(line), len(table), number)
        brackets = [mark in "[{" for mark in bare if mark in "[]{}"]
        depth = max(0, depth + 2 * sum(brackets) - len(brackets))
    return lines


def line_of(lines: dict[Path, int], path: Path) -> int | None:
    """Line of the key, or of the nearest thing around it that has one."""
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return None


def faults(text: str, most: int = 5) -> list[tuple[int, str, str]]:
    """(line, what, remedy) of what keeps a text from being TOML. The parser stops at the first fault, so its line is
    taken out and the rest is read again; a fault that reaches over lines hides those behind it."""
    lines, problems = text.split("\n"), []
    while len(problems) < most:
        try:
            toml_of("\n".join(lines))
            break
        except tomllib.TOMLDecodeError as error:
            what, _, place = str(error).rpartition(" (at ")
            known = re.search(r"line (\d+)", place)
            line = int(known[1]) if known else len(text.rstrip().split("\n"))
            problems.append((line, *_said(what, lines, line)))
            if known is None or not lines[line - 1]:
                break
            lines[line - 1] = ""
    return problems


def _said(what: str, lines: list[str], line: int) -> tuple[str, str]:
    """A parser's word and the line, as (what is wrong, remedy)."""
    key, equals, value = (part.strip() for part in lines[line - 1].partition("="))
    if twice := re.search(r"Cannot declare \((.*?),?\) twice", what):
        section = twice[1].replace("'", "").replace(", ", ".")
        return f"the section [{section}] is there twice", f"put all keys of [{section}] under one heading"
    if "overwrite" in what:
        return f"{key} is there twice", "keep one of the two lines"
    if "too" in what or "digits" in what:
        return what[:1].lower() + what[1:], "a shorter value"
    if "Expected '='" in what or (what == "Invalid statement" and not equals):
        return f"{lines[line - 1].strip()!r} has no '='", _as_toml(lines[line - 1].strip())
    if value.lower() in ("true", "false"):
        return f"{value} is written in small letters", f"{key} = {value.lower()}"
    if "Unclosed" in what or value.count("[") > value.count("]"):
        return "a bracket is not closed", "[0.9, 0.95]"
    if "Illegal character" in what or value[:1] in ("'", '"'):
        return "a string is not closed", f'{key} = "value"'
    if equals and not value:
        return f"{key} has no value", f"{key} = value, or take the line out"
    if value[:1] == ".":
        return f"{value} is no number", f"{key} = 0{value}"
    return f"{value or lines[line - 1].strip()} is no value", f'strings stand in quotes: {key} = "value"'


def _as_toml(line: str) -> str:
    """How TOML writes what a line says in JSON or YAML."""
    if line[:1] in "{}":
        return "this is JSON: TOML writes [section] on a line of its own, and key = value below it"
    if yaml := re.match(r"-?\s*([\w-]+):\s*(.*)$", line):
        return f"this is YAML: TOML writes {f'{yaml[1]} = {yaml[2]}' if yaml[2] else f'[{yaml[1]}]'}"
    return "key = value"


def _record(lines: dict[Path, int], path: Path, known: int, number: int) -> None:
    for length in range(max(known, 0) + 1, len(path) + 1):
        lines.setdefault(path[:length], number)


def _path(text: str) -> Path:
    """The parts of the dotted key with which a text begins; () where there is none."""
    match = _PATH.match(text)
    path: Path = ()
    try:
        node: Any = tomllib.loads(f"{match[1]} = 0") if match else 0
    except tomllib.TOMLDecodeError:
        return ()
    while isinstance(node, dict):
        ((part, node),) = node.items()
        path += (part,)
    return path


def toml(value: Any) -> str:
    """One value as TOML writes it, tables in braces. Raises TypeError for what TOML has no word for."""
    return tomlkit.item(_inline(value)).as_string()


def _inline(value: Any) -> Any:
    """A value with its tables in braces, and without halves of letters that UTF-8 has no bytes for."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    if isinstance(value, (list, tuple)):
        array = tomlkit.array()
        array.extend(map(_inline, value))
        return array
    if isinstance(value, dict):
        table = tomlkit.inline_table()
        table.update({str(key): _inline(inner) for key, inner in value.items()})
        return table
    return value
