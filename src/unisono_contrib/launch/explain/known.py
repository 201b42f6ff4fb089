"""Failures that are known, as data: `data/*.toml`, a file a family. A failure has signs, which are regular expressions
for one line of a log, and says its cause and what to try.

    [[pattern]]
    name = "port-in-use"
    kind = "cause"
    signs = ['EADDRINUSE', 'Address already in use[^\\n]*port:? (?P<port>\\d+)']
    unless = 'retrying'
    says = "the port at which ranks meet is in use[: {port}]"
    likely = "another job listens there"
    try = ["another MASTER_PORT"]

What stands in brackets is left out where the line does not tell what is named there. `lasting`: steps that follow do
not show that it was harmless, as they do after a warning. `explains`: names of patterns; without one of them in the log
it is harmless, and with one it is the cause. No torch.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

KINDS = ("cause", "crash", "stall", "echo")
"""From what is to be mended to what is but a consequence. A crash names a process that failed and not why; a stall has
another process as its cause; an echo says no more than that there was a failure."""
_SPECIAL = re.compile(
    r"\\(?P<escaped>[^\w])|\\\w|\[\^?\]?(?:\\.|[^\]\\])*\]|[.^$]|(?P<plain>[^\\\[\].^$*+?{}()|])"
)
_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_REPEAT = re.compile(r"[*+?]\??|\{[^}]*\}")


@dataclass(frozen=True, slots=True)
class Sign:
    """A regular expression for a line. literal: a text that each line with the sign has; "" if there is none."""

    expression: "re.Pattern[str]"
    literal: str

    def lines(self, text: str) -> Iterator["re.Match[str]"]:
        """The first match in each line of `text` that has one."""
        if not self.literal:
            yield from self.expression.finditer(text)
            return
        at = text.find(self.literal)
        while at >= 0:
            begin, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
            end = len(text) if end < 0 else end
            if match := self.expression.search(text, begin, end):
                yield match
            at = text.find(self.literal, end)


@dataclass(frozen=True, slots=True)
class KnownFailure:
    """One pattern. tries: remedies, the likeliest first."""

    name: str
    kind: str
    signs: tuple[Sign, ...]
    says: str
    likely: str
    tries: tuple[str, ...]
    unless: "re.Pattern[str] | None" = None
    lasting: bool = False
    explains: tuple[str, ...] = ()


@cache
def known_failures() -> tuple[KnownFailure, ...]:
    """All patterns, in the order of their files' names."""
    folder = Path(__file__).with_name("data")
    tables = [
        table
        for path in sorted(folder.glob("*.toml"))
        for table in tomllib.loads(path.read_text("utf-8"))["pattern"]
    ]
    return tuple(map(_read, tables))


def _read(table: Mapping[str, Any]) -> KnownFailure:
    if table["kind"] not in KINDS:
        raise ValueError(f"{table['name']}: its kind is one of {' '.join(KINDS)}")
    return KnownFailure(
        name=table["name"],
        kind=table["kind"],
        signs=tuple(map(sign, table["signs"])),
        says=table["says"],
        likely=table["likely"],
        tries=tuple(table["try"]),
        unless=re.compile(table["unless"]) if "unless" in table else None,
        lasting=table.get("lasting", False),
        explains=tuple(table.get("explains", ())),
    )


def sign(expression: str) -> Sign:
    """`re` as a sign. `Errno (\\d+)\\] No space` has the literal `] No space`."""
    return Sign(re.compile(expression, re.MULTILINE), literal_of(expression))


def literal_of(expression: str) -> str:
    """The longest text that all it matches has, as far as it is easily seen: outside of groups, and not optional."""
    if expression.startswith("(?i)") or "|" in _outer(expression):
        return ""
    best, run, at, outer = "", "", 0, _outer(expression)
    while at < len(outer):
        part = _SPECIAL.match(outer, at)
        letter = (part["escaped"] or part["plain"] or "") if part else ""
        at = part.end() if part else at + 1
        repeat = _REPEAT.match(outer, at)
        if letter and not repeat:
            run += letter
        else:
            best, run = max(best, run, key=len), ""
        at = repeat.end() if repeat else at
    best = max(best, run, key=len)
    return best if len(best) > 3 else ""


def _outer(expression: str) -> str:
    """The expression with `.` in the place of each group."""
    kept, depth, at = "", 0, 0
    while at < len(expression):
        text = _PART.match(expression, at)[0]  # type: ignore[index]
        at += len(text)
        depth -= text == ")"
        if depth == 0:
            kept += "." if text == ")" else "" if text == "(" else text
        depth += text == "("
    return kept


def filled(says: str, words: Mapping[str, str | None]) -> str:
    """A sentence with these words in it: `out of memory[: {want} more]` with want=None is `out of memory`.

    Brackets do not lie within each other."""

    def part(match: "re.Match[str]") -> str:
        names = re.findall(r"\{(\w+)\}", match[1])
        return match[1] if all(words.get(name) for name in names) else ""

    said = re.sub(r"\[([^\]]*)\]", part, says)
    return re.sub(r"\{(\w+)\}", lambda match: words.get(match[1]) or "?", said)
