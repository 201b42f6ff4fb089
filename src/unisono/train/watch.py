"""Observers: they look at each step's report and write it down; nothing that they do changes a step."""

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from unisono.observe import trace
from unisono.observe.files import write_whole
from unisono.observe.memory import peak_rss_mib
from unisono.observe.metrics import JsonLines, read_lines
from unisono.observe.span import PARTS, Lap
from unisono.train.step import Report, Run


class Uplink(Protocol):
    """To whoever watches: see launch.context.Channel."""

    def send(self, kind: str, **fields: Any) -> None: ...
    def stop_requested(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Look:
    """One finished step: its report, where its time went (seconds by part, adding up to `seconds` of wall time, and
    what was hidden), bytes by "axis.operation", targets over all ranks, and peak memory, up to `EVERY` old."""

    report: Report
    times: dict[str, float]
    nbytes: dict[str, int]
    seconds: float
    targets: int
    mem_mib: float


Observer = Callable[[Run, Sequence[Look]], None]

EVERY = 0.5  # seconds


class Journal:
    """Tells observers of the steps, at once those that ended within `EVERY` seconds: writing down one short
    step, with code and data fallen out of the processor's caches, costs several times what it costs among others.

    Whoever has a journal flushes it before a checkpoint, so that no line is missing where a run is resumed, and when
    the run ends in whatever way.
    """

    def __init__(self, run: Run, observers: Sequence[Observer], targets: int) -> None:
        self._run, self._observers, self._targets = run, observers, targets
        self._waiting: list[tuple[Report, Lap, float]] = []
        self._told = 0.0

    def add(self, report: Report, lap: Lap, seconds: float) -> None:
        """A step ended: what it did, what its recorder says, wall seconds. Raises OSError."""
        self._waiting.append((report, lap, seconds))
        now = time.monotonic()
        if now - self._told >= EVERY or report.stop or not report.finite:
            self._told = now
            self.flush()

    def flush(self) -> None:
        """Tell what waits. Raises OSError."""
        if not self._waiting:
            return
        mem_mib = round(peak_rss_mib(), 1)
        looks = [
            Look(report, _times(lap, seconds), _named(lap), seconds, self._targets, mem_mib)
            for report, lap, seconds in self._waiting
        ]
        self._waiting.clear()
        for observer in self._observers:
            observer(self._run, looks)


def _times(lap: Lap, seconds: float) -> dict[str, float]:
    known = {part: lap.seconds.get(part, 0.0) for part in PARTS}
    spent = sum(value for part, value in known.items() if part not in ("comm_hidden", "other"))
    known["other"] = max(0.0, seconds - spent)
    return {part: round(value, 6) for part, value in known.items()}


def _named(lap: Lap) -> dict[str, int]:
    return {f"{axis}.{op}": n for (axis, op), n in lap.nbytes.items()}


def metrics(path: Path) -> Observer:
    """metrics.jsonl, one line a step: on one rank."""
    file = JsonLines(path)

    def observe(run: Run, looks: Sequence[Look]) -> None:
        file.write(
            *(
                {
                    "step": look.report.step,
                    "loss": look.report.loss,
                    "lr": look.report.lr,
                    "grad_norm": look.report.norm,
                    "tokens": look.targets,
                    "tokens_per_s": round(look.targets / look.seconds, 1),
                    "time": look.times,
                    "bytes_sent": sum(look.nbytes.values()),
                    "mem_mib": look.mem_mib,
                }
                for look in looks
            )
        )

    return observe


def events(path: Path, rank: int, host: str, coords: dict[str, int]) -> Observer:
    """events/rank*.jsonl: where this rank's time and bytes went."""
    file = JsonLines(path)
    file.write({"kind": "info", "rank": rank, "host": host, "coords": coords})

    def observe(run: Run, looks: Sequence[Look]) -> None:
        file.write(
            *(
                {
                    "kind": "step",
                    "step": look.report.step,
                    "rank": rank,
                    "time": look.times,
                    "bytes": look.nbytes,
                    "mem_mib": look.mem_mib,
                }
                for look in looks
            )
        )

    return observe


def tell(line: Uplink, steps: int) -> Observer:
    """The live table: one event for the steps that came together, about the last of them."""

    def observe(run: Run, looks: Sequence[Look]) -> None:
        look = looks[-1]
        line.send(
            "step",
            step=look.report.step + 1,
            steps=steps,
            loss=look.report.loss,
            tokens_per_s=look.targets / look.seconds,
            ms=look.seconds * 1e3,
            times=look.times,
            mem_mib=look.mem_mib,
            stage=run.mesh.at["pp"],
        )

    return observe


def tracing(
    path: Path, rank: int, world: int, first: int, count: int, host: str, backend: str
) -> Callable[[Run, Report], None]:
    """trace/rank*.json.gz: the spans of steps first .. first + count - 1, written when the last of them is over. To be
    called after every step, since it says which spans are kept."""

    def after(run: Run, report: Report) -> None:
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

    return after


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
