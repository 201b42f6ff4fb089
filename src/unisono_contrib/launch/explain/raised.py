"""Exceptions in a log: tracebacks of Python, whose ranks may lie within each other, and our own errors. No torch."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from unisono_contrib.launch.explain.logs import LogFile, LogLine

_BEGIN = "Traceback (most recent call last)"
_FRAME = re.compile(r'\s*File "(?P<path>[^"]+)", line (?P<line>\d+)(?:, in (?P<name>.+))?')
_BOX = "│╭╰"  # around tracebacks that rich draws
_BOXED = re.compile(r"│ +(?P<path>/[^ :]+\.py):(?P<line>\d+) in (?P<name>\S+)")
_LAST = re.compile(r"(?P<kind>[A-Za-z_][\w.]*)(?:: ?(?P<what>.*))?$")
_LINKS = {
    "The above exception was the direct cause": "cause",
    "During handling of the above exception": "during",
}
_FOREIGN = re.compile(r"site-packages|dist-packages|/lib/python\d|<frozen|<string>")
_BLOCK = re.compile(r"(?:.*\s)?error U-(?P<code>[A-Z]\d\d)  (?P<what>.*)")
_ROW = re.compile(r"  (?P<key>where|likely|try)\s+(?P<text>.*)")
_NOISE = 4  # lines of others within a traceback


@dataclass(frozen=True, slots=True)
class LoggedException:
    """A chain of exceptions, as one. kind: `KeyError`. place: the innermost line of the user's code, as `data.py:88 in
    load`. line: where it stands. lines: numbers of the last lines of all exceptions of the chain."""

    kind: str
    what: str
    place: str
    line: LogLine
    lines: frozenset[int]


@dataclass(frozen=True, slots=True)
class ErrorBlock:
    """One of our own: `error U-H01  no word from rank 1`, and its rows by name."""

    code: str
    what: str
    rows: dict[str, str]
    line: LogLine


@dataclass
class _Reading:
    """A traceback of one rank that is being read. ends: the exceptions of its chain so far."""

    indent: int = 0
    frames: list[str] = field(default_factory=list)
    noise: int = 0
    inside: bool = True
    link: str = ""
    ends: list[LoggedException] = field(default_factory=list)

    def whole(self) -> Iterator[LoggedException]:
        """The chain as one: the cause of the others, or what was raised while another one was handled."""
        if self.ends:
            main = self.ends[-1 if self.link == "during" else 0]
            lines = frozenset(number for end in self.ends for number in end.lines)
            yield LoggedException(main.kind, main.what, main.place, main.line, lines)


def exceptions(log: LogFile) -> Iterator[LoggedException]:
    """All exceptions whose traceback is in the log, in the order in which their chains end."""
    reading = dict[int | None, _Reading]()
    for line in log.lines:
        state = reading.get(line.rank)
        if _BEGIN in line.body:
            indent = len(line.body) - len(line.body.lstrip())
            if state is not None and not state.inside and state.link:
                state.indent, state.frames, state.inside, state.noise = indent, [], True, 0
            else:
                yield from state.whole() if state else ()
                reading[line.rank] = _Reading(indent)
        elif state is not None:
            _read(state, line)
            if state.noise > _NOISE:
                yield from reading.pop(line.rank).whole()
    for state in reading.values():
        yield from state.whole()


def _read(state: _Reading, line: LogLine) -> None:
    """One more line of a rank that has raised."""
    body = line.body[state.indent :] if line.body[: state.indent].isspace() else line.body
    if not state.inside:
        links = [kind for words, kind in _LINKS.items() if words in body]
        state.link = links[0] if links else state.link
        state.noise += bool(body.strip()) and not links
    elif frame := _FRAME.match(body) or _BOXED.match(body):
        state.frames.append(
            f"{frame['path']}:{frame['line']}" + (f" in {frame['name']}" if frame["name"] else "")
        )
    elif not body or body[0].isspace() or body[0] in _BOX:
        pass
    elif state.frames and (end := _LAST.match(body)) and _is_kind(end["kind"], end["what"]):
        inner = [frame for frame in state.frames if not _FOREIGN.search(frame)]
        place = (inner or state.frames)[-1]
        raised = LoggedException(
            end["kind"].rpartition(".")[2], end["what"] or "", place, line, frozenset({line.number})
        )
        state.ends.append(raised)
        state.inside, state.noise = False, 0
    else:
        state.noise += 1


def _is_kind(kind: str, what: str | None) -> bool:
    """Whether a word is the name of an exception: its last part begins with a capital, or says so."""
    last = kind.rpartition(".")[2]
    return last[:1].isupper() and (
        what is not None or last.endswith(("Error", "Exception", "Interrupt", "Exit", "Iteration"))
    )


def error_blocks(log: LogFile) -> Iterator[ErrorBlock]:
    """Our own errors, as they are printed last."""
    for number, line in enumerate(log.lines):
        if match := _BLOCK.fullmatch(line.body):
            rows = dict[str, str]()
            for later in islice(log.lines, number + 1, number + 4):
                if row := _ROW.match(later.body):
                    rows.setdefault(row["key"], row["text"])
            yield ErrorBlock(match["code"], match["what"], rows, line)
