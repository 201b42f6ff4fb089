"""The life of a run: `history.jsonl` in its folder, one object a line. No torch.

    {"at": 1795553000.1, "event": "start", "step": 0, "ranks": 4, "plan": "dp=4"}    a start, first or again
    {"at": 1795553061.0, "event": "lost", "epoch": 1, "lost": {"1": "killed by SIGKILL"}, "born": [1]}
    {"at": 1795553062.5, "event": "met", "epoch": 1, "step": 57}    all ranks train again, after that step
    {"at": 1795553092.7, "event": "end", "step": 212}               an end in good order: done, or stopped and saved;
                                                                    with `early`, why it ended before its last step
    {"at": 1795553200.0, "event": "code", "git": {"commit": "0a1b..", "changed": false}}    gone on with other code

`lost` names ranks, or `helper` or `supervisor`. A start that failed as a whole has `"whole": true`: its guardian writes
that, or else the next start, at the time of the last step, as far as metrics tell. Other fields say what else changed,
as `data` (its fingerprint), `ranks`, `plan` and `hosts`; `changed` is a line of such fields alone. Rank 0 writes
`start` and `end`.
"""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.observe.metrics import JsonLines
from unisono.spec.runs import HISTORY

FILE = HISTORY


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


def begin(run_dir: Path, step: int, again: bool = False, **facts: Any) -> None:
    """A start, from `step`. One before it that did not end was lost, at the time of its last line. again: ranks that
    were lost have been replaced, which is none if there was one. Raises OSError."""
    events = _lines(run_dir)
    under_way = False
    for line in events:
        under_way = line["event"] == "start" or (
            under_way and line["event"] != "end" and not line.get("whole")
        )
    if under_way and again:
        return
    if under_way:
        note(run_dir, "lost", at=max(events[-1]["at"], _last_step(run_dir)), whole=True)
    note(run_dir, "start", step=step, **facts)


def changed(run_dir: Path, event: Mapping[str, Any]) -> None:
    """An event of the kind `members`: ranks were lost, have met again, or are others. Raises OSError."""
    facts = {key: value for key, value in event.items() if key not in ("kind", "met")}
    if "met" in event:
        note(run_dir, "met", **{**facts, "step": event["met"]})
    else:
        note(run_dir, "lost" if "lost" in event else "changed", **facts)


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


def ended(run_dir: Path) -> bool:
    """Whether the last start has ended in good order."""
    events = [line["event"] for line in _lines(run_dir) if line["event"] in ("start", "end")]
    return events[-1:] == ["end"]


def _between(since: float | None, at: float) -> float:
    return max(0.0, at - since) if since is not None else 0.0


def _last_step(run_dir: Path) -> float:
    try:
        return (run_dir / "metrics.jsonl").stat().st_mtime
    except OSError:
        return 0.0


def _lines(run_dir: Path) -> list[dict[str, Any]]:
    """Whole lines; what was cut short by a full disk or a kill says nothing."""
    lines = []
    with suppress(OSError):
        for text in (run_dir / FILE).read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, RecursionError):
                line = json.loads(text)
                if isinstance(line, dict) and isinstance(line.get("at"), int | float) and "event" in line:
                    lines.append(line)
    return lines
