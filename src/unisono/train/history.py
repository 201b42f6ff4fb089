"""How often a run was begun, ended and lost: `history.jsonl` in its folder, one object a line. No torch.

    {"at": 1795553000.1, "event": "start", "step": 0}     a start, first or again
    {"at": 1795553042.7, "event": "end", "step": 212}     an end in good order: done, or stopped and saved
    {"at": 1795553061.0, "event": "lost"}                 a failure within a start, after which it went on

A start that did not end failed as a whole: the next one writes that down as `"whole": true`, at the time of its last
step, as far as metrics tell.
"""

import json
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.observe.metrics import JsonLines

FILE = "history.jsonl"


@dataclass(frozen=True, slots=True)
class Past:
    """starts: how often it was begun. uptime: seconds in which it ran. failures: in that time."""

    starts: int = 0
    uptime: float = 0.0
    failures: int = 0


def note(run_dir: Path, event: str, **facts: Any) -> None:
    """Write down what happened now; `event` as above. Raises OSError."""
    with JsonLines(run_dir / FILE) as lines:
        lines.write({"at": time.time(), "event": event, **facts})


def begin(run_dir: Path, step: int, again: bool = False) -> None:
    """A start, from `step`. One before it that did not end was lost, at the time of its last line. again: no start, but
    ranks that were lost have been replaced. Raises OSError."""
    if again:
        note(run_dir, "lost", step=step)
        return
    told = _lines(run_dir)
    if told and told[-1]["event"] != "end" and not told[-1].get("whole"):
        ended = max(told[-1]["at"], _last_step(run_dir))
        with JsonLines(run_dir / FILE) as lines:
            lines.write({"at": ended, "event": "lost", "whole": True})
    note(run_dir, "start", step=step)


def past(run_dir: Path) -> Past:
    """What is known until now, of the start under way too."""
    starts = failures = 0
    uptime, since = 0.0, None
    for line in _lines(run_dir):
        match line["event"]:
            case "start":
                starts, since = starts + 1, line["at"]
            case "end":
                uptime, since = uptime + _between(since, line["at"]), None
            case "lost":
                failures += 1
                if line.get("whole"):
                    uptime, since = uptime + _between(since, line["at"]), None
    return Past(starts, uptime + _between(since, time.time()), failures)


def _between(since: float | None, at: float) -> float:
    return max(0.0, at - since) if since is not None else 0.0


def _last_step(run_dir: Path) -> float:
    try:
        return (run_dir / "metrics.jsonl").stat().st_mtime
    except OSError:
        return 0.0


def _lines(run_dir: Path) -> list[dict[str, Any]]:
    """Whole lines; what was cut short by a full disk or a kill says nothing."""
    found = []
    with suppress(OSError):
        for text in (run_dir / FILE).read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                line = json.loads(text)
                if isinstance(line, dict) and isinstance(line.get("at"), int | float) and "event" in line:
                    found.append(line)
    return found
