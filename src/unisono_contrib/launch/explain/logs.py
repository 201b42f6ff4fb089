"""Logs as lines: of a file, a folder or standard input. Each line has its number, and the rank and the time that its
prefix names, whoever put it there: torchrun, srun, mpirun, Ray, Kubernetes, c10d, the kernel. No torch."""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from unisono.spec.errors import UsageError

HEAD, TAIL = 8 << 20, 56 << 20
"""Bytes that are read of a long file: its beginning and its end."""
LONGEST = 8192  # letters of a line that are read
MOST = 4096  # files of a folder
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[=>()][A-Z0-9]?")
_NAMES = re.compile(
    r"(?:.*\.(?:log|out|err|txt|stderr|stdout)(?:\.\d+)?|stderr|stdout|dmesg|messages|syslog|error\.json|log\.jsonl)"
)
_RANK_IN_NAME = re.compile(
    r"rank[-_.]?(\d+)|attempt_\d+/(\d+)/(?:stderr|stdout)|(?:^|/)task[-_](\d+)|worker[-_.]?(\d+)\.\w+$"
)
_CLOCK = r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d(?:[.,]\d+)?)"
_MONTHS: Sequence[str] = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split()
_TIMES = (
    re.compile(rf"\b20\d\d[-/](?P<month>\d\d)[-/](?P<day>\d\d)[T _]{_CLOCK}"),
    re.compile(rf"\b(?P<name>{'|'.join(_MONTHS)}) +(?P<day>\d\d?) {_CLOCK}"),
    re.compile(rf"\[?\b[IWEF](?P<month>\d\d?)(?P<day>\d\d) {_CLOCK}"),
    re.compile(rf"(?:^|[\[( ]){_CLOCK}\b"),
)
_PREFIXES = (
    re.compile(r"\[(?:rank|default)(?P<rank>\d+)\]: ?"),
    re.compile(r"\[\d+,(?P<rank>\d+)\]<std(?:out|err)>: ?"),
    re.compile(r"\([A-Za-z_][\w.:]* pid=\d+(?:, ip=[\d.]+)?\) ?"),
    re.compile(r"\[pod/[^\]]+\] ?"),
    re.compile(r"\[(?:\d{3,}|[ +]*\d+\.\d{3,})\] ?"),
    re.compile(r"[\w.-]+ +\| "),
    re.compile(r"\[?20\d\d[-/]\d\d[-/]\d\d[T _]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?[ :]*"),
    re.compile(
        r"\[?(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) )?(?:"
        + "|".join(_MONTHS)
        + r") +\d\d? \d\d:\d\d:\d\d(?: 20\d\d)?\]? ?"
    ),
    re.compile(r"\[?[IWEF]\d{3,4} \d\d:\d\d:\d\d\.\d+ \d+ [^\]]*\] ?"),
)
_NUMBER = re.compile(r"(?P<rank>\d{1,5}): ?")  # srun --label
_HOST = re.compile(r"[A-Za-z][\w.-]*\d[\w.-]*: ")  # pdsh
_SPOKEN = re.compile(r"\[(?:PG [^\]]*)?[Rr]ank (\d+)\]|\brank[ _:=]{1,4}(\d+)\b|\bRank (\d+)\b")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line. number: the first of a file is 1. text: without colours. body: without its prefix. rank: whose line it
    is, as its prefix or its file says. at: seconds within a year, by the newest time so far; None if there was none."""

    number: int
    text: str
    body: str
    rank: int | None
    at: float | None

    def spoken_rank(self) -> int | None:
        """The rank that the line is about, if its prefix names none."""
        if self.rank is not None or not (match := _SPOKEN.search(self.text)):
            return self.rank
        return next(int(number) for number in match.groups() if number)


@dataclass(frozen=True, slots=True)
class LogFile:
    """One log. text: its lines, joined. left_out: bytes in the middle that were not read."""

    name: str
    lines: tuple[LogLine, ...]
    left_out: int = 0

    @property
    def text(self) -> str:
        return "\n".join(line.text for line in self.lines)


def read_logs(where: str, stdin: IO[bytes] | None = None) -> tuple[LogFile, ...]:
    """The logs of a file, of a folder, or of `-`. Raises UsageError E02."""
    if where == "-":
        return (log_of("stdin", (stdin or sys.stdin.buffer).read().decode("utf-8", "replace")),)
    root = Path(where)
    paths = list(_inside(root)) if root.is_dir() else [root]
    if not paths:
        raise UsageError(
            "this folder has no log", where=where, likely="its files end neither with .log, .out, .err nor .txt, and it"
            " has no error.json", fix="unisono doctor explain FILE", code="E02",
        )  # fmt: skip
    return tuple(_read(path, str(path.relative_to(root)) if root.is_dir() else where) for path in paths)


def _inside(root: Path) -> Iterator[Path]:
    """Logs of a folder, by rank and by name; what a run keeps of its ranks and checkpoints is no log."""
    seen = [
        path
        for path in sorted(root.rglob("*"))
        if _NAMES.fullmatch(path.name)
        and path.is_file()
        and not {"checkpoints", "trace", "events"} & set(path.parts)
    ]
    yield from sorted(seen[:MOST], key=lambda path: (_rank_of(str(path.relative_to(root))) or 0, str(path)))


def _rank_of(name: str) -> int | None:
    match = _RANK_IN_NAME.search(name)
    return next((int(number) for number in match.groups() if number), None) if match else None


def _read(path: Path, name: str) -> LogFile:
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            data = file.read(HEAD + TAIL)
            left_out = max(0, size - HEAD - TAIL)
            if left_out:
                file.seek(size - TAIL)
                data = data[:HEAD] + b"\n" + file.read(TAIL)
    except OSError as error:
        raise UsageError(str(error), where=name, fix="unisono doctor explain LOG", code="E02") from error
    return log_of(name, data.decode("utf-8", "replace"), left_out)


def log_of(name: str, text: str, left_out: int = 0) -> LogFile:
    """A log by its text."""
    raw = [_plain(line) for line in text.split("\n")]
    if raw and not raw[-1]:
        raw.pop()
    common = tuple(prefix for prefix in (_NUMBER, _HOST) if _is_common(prefix, raw))
    of_file, at, lines = _rank_of(name), None, []
    for number, line in enumerate(raw, 1):
        body, rank = _parted(line, (*common, *_PREFIXES))
        at = _time(line, at)
        lines.append(LogLine(number, line, body, of_file if rank is None else rank, at))
    return LogFile(name, tuple(lines), left_out)


def _plain(line: str) -> str:
    line = _COLOURS.sub("", line).rstrip("\r ").replace("\r", " ").replace("\0", "")
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"


def _is_common(prefix: "re.Pattern[str]", lines: Sequence[str]) -> bool:
    """Whether half of the lines begin so: a launcher put it there."""
    count = sum(prefix.match(line) is not None for line in lines)
    return 2 * count > sum(bool(line) for line in lines)


def _parted(line: str, prefixes: Sequence["re.Pattern[str]"]) -> tuple[str, int | None]:
    """(the line without prefixes, the rank that they name)."""
    rank, at, left = None, 0, list(prefixes)
    while match := next(filter(None, (prefix.match(line, at) for prefix in left)), None):
        left.remove(match.re)
        at = match.end()
        rank = rank if "rank" not in match.re.groupindex else int(match["rank"])
    return line[at:], rank


def _time(line: str, before: float | None) -> float | None:
    """Seconds within a year: of the line, else of the one before it. A time without a date is of the day before it."""
    for form in _TIMES:
        if match := form.search(line, 0, 200):
            seconds = (
                int(match["hour"]) * 3600
                + int(match["minute"]) * 60
                + float(match["second"].replace(",", "."))
            )
            words = match.groupdict()
            if not words.get("day"):
                return None if before is None else before // 86400 * 86400 + seconds
            month = _MONTHS.index(words["name"]) + 1 if words.get("name") else int(words["month"])
            return (month * 31 + int(words["day"])) * 86400 + seconds
    return before
