"""What came of faults: `chaos.jsonl` in a run's folder, one event a line, and what follows from it. No torch.

Ranks and supervisor append to one file. `t` is in seconds of the host's monotonic clock, which all its processes share;
`time` is Unix time. Events:

    script    a supervisor under a script begins       supervisor
    planned   a fault of the script                    supervisor
    injected  now it happens                           the rank, just before
    detected  a loss is known                          supervisor; of one that was killed, the next
    meets     the rank leaves what it was in           each rank
    met       it has its state, and trains             each rank
    step      it has made the first step since         each rank
"""

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from unisono.observe.metrics import read_lines
from unisono_contrib.programs.chaos.fault import FAULTS, SUPERVISOR
from unisono_contrib.programs.chaos.script import Script

FILE = "chaos.jsonl"
TIMES = {"detected": "detected", "meets": "meets", "met": "met", "next": "step"}
"""What is told of a fault: seconds from it to these events; the first step made since is `next`."""
Line = dict[str, Any]


class Sequel:
    """The file, for one who writes. script: the digest of the faults that are played; lines of others are not seen."""

    def __init__(self, run_dir: Path, script: str) -> None:
        self._path, self._script = run_dir / FILE, script

    def add(self, event: str, **fields: Any) -> None:
        """Append a line, in one write, so that two writers never mix. A full disk loses it."""
        line = {
            "event": event,
            "script": self._script,
            "t": round(time.monotonic(), 6),
            "time": time.time(),
            **fields,
        }
        with suppress(OSError):
            file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                size = os.fstat(file).st_size
                broken = size and os.pread(file, 1, size - 1) != b"\n"  # a full disk cut the last line
                os.write(file, b"\n" * bool(broken) + json.dumps(line).encode() + b"\n")
            finally:
                os.close(file)

    def lines(self) -> list[Line]:
        """All lines of this script so far."""
        return [line for line in read(self._path.parent) if line.get("script") == self._script]


def read(run_dir: Path) -> list[Line]:
    """The lines of a run; none where it was played no faults. A line that a full disk cut is left out."""
    try:
        return read_lines(run_dir / FILE)[0]
    except OSError:
        return []


def began(run_dir: Path, text: str, died: str = "", since: float = 0.0) -> Sequel:
    """The file of a run whose supervisor begins under a script's text, with what is planned. died: how the supervisor
    before it was killed, `since` when by the monotonic clock."""
    script = Script.of_text(text)
    sequel = Sequel(run_dir, script.digest)
    known = sequel.lines()
    sequel.add("script", pid=os.getpid())
    if died:
        sequel.add("detected", t=round(since, 6), epoch=0, lost={SUPERVISOR: died}, born=[])
    for number, fault in enumerate(script.faults if not known else ()):
        sequel.add("planned", fault=number, says=fault.as_json())
    return sequel


def what_followed(lines: Iterable[Line]) -> list[dict[str, Any]]:
    """A row for each planned fault: what it is, when it happened, and seconds from then to each of TIMES.

    What loses no rank is followed by nothing. Where ranks were lost again before they had met, the meeting that counts
    is the one that led to a step."""
    lines = _of_launches(lines)
    rows: dict[int, dict[str, Any]] = {}
    for line in lines:
        if line["event"] == "planned":
            rows.setdefault(line["fault"], {**line["says"], "fault": line["fault"], "injected": None})
    for line in lines:
        if line["event"] == "injected" and (row := rows.get(line["fault"])) and row["injected"] is None:
            row |= {"injected": line["t"], "rank": line["rank"], "at_step": line["step"], "in": line["phase"]}
            if FAULTS[row["what"]].loses:
                row |= _after(line, lines, FAULTS[row["what"]].stays)
    return [rows[number] for number in sorted(rows)]


def _of_launches(lines: Iterable[Line]) -> list[Line]:
    """The lines, each with how many supervisors have begun, and its epoch among those of all of them."""
    launch, rows = 0, []
    for line in lines:
        launch += line["event"] == "script"
        rows.append({**line, "epoch": (launch, line["epoch"])} if "epoch" in line else line)
    return rows


def _after(injected: Line, lines: Sequence[Line], stays: bool) -> dict[str, float | None]:
    begun, moments = injected["t"], dict[str, float | None](dict.fromkeys(TIMES))
    losses = [line for line in lines if line["event"] == "detected" and line["t"] >= begun]
    here = [line for line in losses if _is_of(injected["rank"], line) and not stays]
    if not losses:
        return moments
    loss = (here or losses)[0]
    moments["detected"] = loss["t"] - begun
    later = [line for line in lines if line["t"] >= loss["t"] and line.get("epoch", (0, -1)) >= loss["epoch"]]
    steps = [line for line in later if line["event"] == "step"]
    if steps:
        epoch = min(line["epoch"] for line in steps)
        moments["next"] = min(line["t"] for line in steps if line["epoch"] == epoch) - begun
        for name in ("meets", "met"):
            times = [line["t"] for line in later if line["event"] == name and line["epoch"] == epoch]
            moments[name] = max(times) - begun if times else None
    return moments


def _is_of(who: int | str, loss: Line) -> bool:
    """Whether a loss that was detected is that of a rank, or of the process above. A supervisor takes all with it."""
    return SUPERVISOR in loss["lost"] or who in loss["born"] or who in loss["lost"]


def summed_up(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How many faults were planned, happened, and were followed by a step; medians and greatest of the times."""
    summary: dict[str, Any] = {
        "planned": len(rows),
        "injected": sum(row["injected"] is not None for row in rows),
    }
    lost = [row for row in rows if row["injected"] is not None and FAULTS[row["what"]].loses]
    summary |= {"losses": len(lost), "recovered": sum(row.get("next") is not None for row in lost)}
    for name in TIMES:
        times = [row[name] for row in lost if row.get(name) is not None]
        summary[f"{name}_s"] = (
            {"median": round(median(times), 4), "max": round(max(times), 4)} if times else None
        )
    return summary


def in_words(summary: Mapping[str, Any]) -> str:
    """`20 of 20 played; 13 losses, 13 made good; 0.31 s to the next step (median), 0.62 s at most`."""
    text = f"{summary['injected']} of {summary['planned']} played; "
    text += f"{summary['losses']} losses, {summary['recovered']} made good"
    step = summary["next_s"]
    return text + (
        f"; {step['median']:.2f} s to the next step (median), {step['max']:.2f} s at most" if step else ""
    )
