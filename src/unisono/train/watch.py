"""Observers: they look at each step's report and write it down; nothing that they do changes a step."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from unisono.observe import trace
from unisono.observe.files import write_whole
from unisono.observe.memory import peak_rss_mib
from unisono.observe.metrics import JsonLines, read_lines
from unisono.observe.span import PARTS, Lap
from unisono.train.step import Report, Run

Observer = Callable[[Run, Report, "Measure"], None]


class Line(Protocol):
    """To whoever watches: see launch.context.Channel."""

    def send(self, kind: str, **fields: Any) -> None: ...
    def stop_requested(self) -> bool: ...


class Measure:
    """Where the time of one step went: seconds by part, bytes by (axis, operation), wall seconds, targets."""

    def __init__(self, lap: Lap, seconds: float, targets: int) -> None:
        known = {part: lap.seconds.get(part, 0.0) for part in PARTS}
        spent = sum(value for part, value in known.items() if part not in ("comm_hidden", "other"))
        known["other"] = max(0.0, seconds - spent)
        self.times = {part: round(value, 6) for part, value in known.items()}
        self.nbytes = {f"{axis}.{op}": n for (axis, op), n in lap.nbytes.items()}
        self.seconds, self.targets = seconds, targets
        self.mem_mib = round(peak_rss_mib(), 1)


def metrics(path: Path) -> Observer:
    """metrics.jsonl, one line a step: on one rank."""
    file = JsonLines(path)

    def look(run: Run, report: Report, measure: Measure) -> None:
        file.write(
            {
                "step": report.step,
                "loss": report.loss,
                "lr": report.lr,
                "grad_norm": report.norm,
                "tokens": measure.targets,
                "tokens_per_s": round(measure.targets / measure.seconds, 1),
                "time": measure.times,
                "bytes_sent": sum(measure.nbytes.values()),
                "mem_mib": measure.mem_mib,
            }
        )

    return look


def events(path: Path, rank: int, host: str, coords: dict[str, int]) -> Observer:
    """events/rank*.jsonl: where this rank's time and bytes went."""
    file = JsonLines(path)
    file.write({"kind": "info", "rank": rank, "host": host, "coords": coords})

    def look(run: Run, report: Report, measure: Measure) -> None:
        file.write(
            {
                "kind": "step",
                "step": report.step,
                "rank": rank,
                "time": measure.times,
                "bytes": measure.nbytes,
                "mem_mib": measure.mem_mib,
            }
        )

    return look


def tell(line: Line, steps: int, every: float = 0.2) -> Observer:
    """The live table: at most one event per `every` seconds, and the last step always."""
    last = 0.0

    def look(run: Run, report: Report, measure: Measure) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < every and report.step + 1 < steps and not report.stop:
            return
        last = now
        line.send(
            "step",
            step=report.step + 1,
            steps=steps,
            loss=report.loss,
            tokens_per_s=measure.targets / measure.seconds,
            ms=measure.seconds * 1e3,
            times=measure.times,
            mem_mib=measure.mem_mib,
            stage=run.mesh.at["pp"],
        )

    return look


def tracing(path: Path, rank: int, world: int, first: int, count: int, host: str, backend: str) -> Observer:
    """trace/rank*.json.gz: the spans of steps first .. first + count - 1, written when the last of them is over."""

    def look(run: Run, report: Report, measure: Measure) -> None:
        recorder = run.recorder
        if report.step + 1 == first:
            recorder.keep = True
        elif recorder.keep and (report.step + 1 >= first + count or report.stop):
            recorder.keep = False
            spans = recorder.take()
            trace.write(
                path,
                spans,
                rank,
                world,
                epoch_ns=recorder.epoch_ns,
                host=host,
                backend=backend,
                coords=run.mesh.at,
            )

    return look


def forget_from(path: Path, step: int) -> None:
    """Drop the lines of steps from `step` on: a resumed run makes them again. Killed here, the file is as it was."""
    if not path.is_file():
        return
    kept = [r for r in read_lines(path)[0] if "step" not in r or r["step"] < step]
    write_whole(path, "".join(json.dumps(r, separators=(",", ":")) + "\n" for r in kept))


def forget_ranks(run_dir: Path, world: int, step: int) -> None:
    """Drop what ranks that no longer exist have left of steps from `step` on: a resumed run may have fewer."""
    for path in run_dir.glob("*/rank*"):
        number = re.fullmatch(r"rank(\d+)\.(jsonl|json\.gz)", path.name)
        if number is None or int(number[1]) < world:
            continue
        if number[2] == "jsonl":
            forget_from(path, step)
        else:
            path.unlink()
