"""Lines that ranks printed and that were noted of them: which are shown, and how bad each is."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from unisono.report.collect import Record
from unisono.spec.words import whole

LEVELS = ("output", "note", "warning", "error")
_MOST = 400  # lines of an answer
_ERROR = re.compile(r"(error|exception)\b|\b(traceback|fatal|failed|killed)\b|was lost", re.IGNORECASE)
_WARNING = re.compile(r"warn(ing)?\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class LogFilter:
    """rank: None for all. level: the least one of `LEVELS`. text: what the line holds, whatever the case."""

    rank: int | None
    level: int
    text: str

    @staticmethod
    def of(rank: str, level: str, text: str) -> "LogFilter":
        """By the words of a form; what is none of them lets all pass."""
        return LogFilter(whole(rank), LEVELS.index(level) if level in LEVELS else 0, text.casefold())

    def passes(self, line: Record) -> bool:
        """Whether a line is shown."""
        return (
            (self.rank is None or line.get("rank") == self.rank)
            and LEVELS.index(level_of(line)) >= self.level
            and (not self.text or self.text in str(line.get("text", "")).casefold())
        )


def level_of(line: Record) -> str:
    """One of `LEVELS`: by its words where a rank printed it."""
    text = str(line.get("text", ""))
    if _ERROR.search(text):
        return "error"
    if _WARNING.search(text):
        return "warning"
    return "note" if line.get("kind") == "note" else "output"


def matching(lines: Iterable[Record], wanted: LogFilter, most: int = _MOST) -> dict[str, Any]:
    """The latest lines that pass, oldest first, and how many there are."""
    passed = [line for line in list(lines) if wanted.passes(line)]
    shown = [
        {
            "at": line.get("at"),
            "rank": line.get("rank", -1),
            "level": level_of(line),
            "text": str(line.get("text", "")),
        }
        for line in passed[-most:]
    ]
    return {"count": len(passed), "lines": shown}
