"""What a log shows: its signs of known failures, its exceptions, and how far the run was at each line. No torch."""

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from unisono_contrib.launch.explain.known import KINDS, KnownFailure, filled, known_failures
from unisono_contrib.launch.explain.logs import LogFile, LogLine
from unisono_contrib.launch.explain.raised import ErrorBlock, LoggedException, error_blocks, exceptions

_STEP = re.compile(
    r"(?i)(?:^|[^\w.])(?:global_?step|step|iter(?:ation)?|epoch|it)s?['\"]?[\s:=\[/#|]{1,4}(\d+)\b"
    r"|\b(\d+)/\d+ \[\d+:\d\d|['\"]epoch['\"]: (\d+\.\d+)"
)
_NO_NUMBER = re.compile(r"(?i)(?<![\w-])(?:nan|inf)\b")
ENOUGH = 3
"""Steps behind a line that show that the run went on, and was not ended by what the line says."""
_OURS = {"R03": "echo", "R01": "crash", "R02": "crash", "X00": "crash"}
_WHO = re.compile(r", rank (?P<rank>\d+)(?:, host (?P<host>\S+))?$")
_ERROR = re.compile(
    r"^(?:[\w.]*\.)?\w*(?:Error|Exception)\b(?::|$)|\b(?:ERROR|FATAL|CRITICAL)\b|\b(?:[Ee]rror|fatal|panic): "
    r"|\berror U-|core dumped|\bAborted\b"
)
_WARNING = re.compile(r"(?:^|[\s\]:])\[W\d* |Warning: ")
_MOST = 64  # findings of one pattern in a file


@dataclass(frozen=True, slots=True)
class LogFinding:
    """One failure as a log has it. name: of its pattern, `exception`, or `U-H01`. rank, host, step: as far as they are
    known."""

    name: str
    kind: str
    says: str
    likely: str
    tries: tuple[str, ...]
    log: LogFile
    line: LogLine
    rank: int | None = None
    host: str = ""
    step: int | None = None
    lasting: bool = False
    explains: tuple[str, ...] = ()

    @property
    def weight(self) -> float:
        """0 for a cause, more for what is more of a consequence. A warning counts where nothing but echoes is seen."""
        is_hint = not self.explains and _WARNING.search(self.line.text)
        return max(KINDS.index(self.kind), KINDS.index("echo") - 0.5) if is_hint else KINDS.index(self.kind)


@dataclass(frozen=True, slots=True)
class LogEvidence:
    """What one log shows. steps: (number of the line, step) in order. last_error: the last line that tells an error."""

    log: LogFile
    findings: tuple[LogFinding, ...]
    steps: tuple[tuple[int, int], ...]
    last_error: LogLine | None

    def fatal(self) -> list[LogFinding]:
        """Findings after which the run did not go on."""
        return [
            finding
            for finding in self.findings
            if finding.lasting or not self.goes_on_after(finding.line.number)
        ]

    def goes_on_after(self, line: int) -> bool:
        later = self.steps[bisect_right(self.steps, (line, 1 << 62)) :]
        return len({step for _, step in later}) >= ENOUGH

    def step_at(self, line: LogLine) -> int | None:
        """The step that a line names, or the newest before it."""
        named = _step_of(line)
        place = bisect_right(self.steps, (line.number, 1 << 62))
        before = (step for _, step in reversed(self.steps[:place]))
        return next((step for step in (named, *before) if step is not None and step >= 0), None)


def look(log: LogFile) -> LogEvidence:
    """All that a log shows."""
    steps = tuple(_steps(log))
    bare = LogEvidence(log, (), steps, None)
    by_line = dict[int, list[LogFinding]]()
    for finding in _known(log):
        by_line.setdefault(finding.line.number, []).append(finding)
    blocks = [_of_block(block, log) for block in error_blocks(log)]
    free = [error for error in exceptions(log) if not _is_explained(error, by_line)]
    findings = [finding for several in by_line.values() for finding in several] + blocks
    findings += [_of_exception(error, log) for error in free]
    placed = [
        replace(finding, step=bare.step_at(finding.line))
        for finding in sorted(findings, key=lambda each: each.line.number)
    ]
    bad = [line for line in log.lines if _ERROR.search(line.body) and not bare.goes_on_after(line.number)]
    return LogEvidence(log, tuple(placed), steps, bad[-1] if bad else None)


def _steps(log: LogFile) -> Iterator[tuple[int, int]]:
    for line in log.lines:
        step = _step_of(line)
        if step is not None and not _NO_NUMBER.search(line.text):
            yield line.number, step


def _step_of(line: LogLine) -> int | None:
    """The step that a line names; less than 0 for an epoch with a fraction, which shows progress and is no step."""
    match = _STEP.search(line.text)
    if match and match[3]:
        return -int(match[3].replace(".", ""))
    return int(match[1] or match[2]) if match else None


def _known(log: LogFile) -> Iterator[LogFinding]:
    """Signs of known failures: one of each pattern and line."""
    text = log.text
    starts = [0]
    for line in log.lines:
        starts.append(starts[-1] + len(line.text) + 1)
    for pattern in known_failures():
        lines = dict[int, Mapping[str, str | None]]()
        for sign in pattern.signs:
            for match in sign.lines(text):
                number = bisect_right(starts, match.start())
                words = {**match.groupdict(), **{k: v for k, v in lines.get(number, {}).items() if v}}
                lines[number] = words
        kept = 0
        for number in sorted(lines):
            line = log.lines[number - 1]
            if kept < _MOST and not (pattern.unless and pattern.unless.search(line.text)):
                kept += 1
                yield _of_pattern(pattern, log, line, lines[number])


def _of_pattern(
    pattern: KnownFailure, log: LogFile, line: LogLine, words: Mapping[str, str | None]
) -> LogFinding:
    return LogFinding(
        pattern.name, pattern.kind, filled(pattern.says, words), pattern.likely, pattern.tries, log, line,
        line.spoken_rank(), lasting=pattern.lasting, explains=pattern.explains,
    )  # fmt: skip


def _is_explained(error: LoggedException, lines: Mapping[int, list[LogFinding]]) -> bool:
    return any(number in lines for number in error.lines)


def _of_exception(error: LoggedException, log: LogFile) -> LogFinding:
    what = f"{error.kind}: {error.what}" if error.what else error.kind
    return LogFinding(
        "exception", "crash", f"the program raised {what}", f"at {error.place}",
        ("the line of the program that is named, with the values that it had on this rank",), log, error.line,
        error.line.spoken_rank(),
    )  # fmt: skip


def _of_block(block: ErrorBlock, log: LogFile) -> LogFinding:
    who = _WHO.search(block.what)
    rank = int(who["rank"]) if who else block.line.rank
    where = f", {block.rows['where']}" if "where" in block.rows else ""
    return LogFinding(
        f"U-{block.code}", _OURS.get(block.code, "cause"), _WHO.sub("", block.what) + where,
        block.rows.get("likely", ""),
        (block.rows["try"],) if "try" in block.rows else (f"docs/errors.md has U-{block.code}",), log, block.line, rank,
        (who["host"] or "") if who else "",
    )  # fmt: skip
