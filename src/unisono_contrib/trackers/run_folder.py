"""What trackers show of a run, read from its folder while the run goes on. No torch."""

import hashlib
import json
import math
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from unisono.spec.runs import CHECKPOINTS, CONFIG
from unisono.spec.words import is_number
from unisono_contrib.report.catalogue import history_of, json_of, state_of, toml_of_run
from unisono_contrib.trackers import Point, TrackedRun

METRICS = "metrics.jsonl"
_ODD = re.compile(r"[^\w\-./ ]")  # letters that some tracker does not take in a name
_LEFT_OUT = ("step", "ledger")  # the ledger has a number for each way of each collective: the report draws it


class StepReader:
    """The points of `metrics.jsonl`, read on as the file grows, and from its beginning when it was replaced: a resumed
    run takes away the steps that it makes again.

    points: those above `safe`, which its owner raises as they are done with. last: the last step; 0 where there is
    none."""

    def __init__(self, folder: Path, safe: int) -> None:
        self.folder, self.safe = folder, safe
        self.points: list[Point] = []
        self._starts: list[tuple[int, float]] = []
        self._reset()

    def _reset(self) -> None:
        self.points.clear()
        self.last, self._steps, self._digests = 0, list[int](), [""]
        self._file, self._offset, self._shift = 0, 0, 0
        self._start, self._seconds = 0, 0.0

    def forget(self, safe: int) -> None:
        """Keep points above `safe` alone."""
        if safe < self.safe:
            self._reset()
        self.safe = safe
        self.points = [point for point in self.points if point.step > safe]

    def digest(self, until: int) -> str:
        """Of the stable numbers of all steps up to `until`."""
        return self._digests[bisect_right(self._steps, until)]

    def read(self) -> None:
        """Bring the points up to date. Raises OSError."""
        self._starts = starts_of(self.folder)
        if not (self.folder / METRICS).is_file():
            self._reset()
            return
        with (self.folder / METRICS).open("rb") as file:
            seen = os.fstat(file.fileno())
            if seen.st_ino != self._file or seen.st_size < self._offset:
                self._reset()
                self._file = seen.st_ino
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        for line in whole.splitlines():
            with suppress(ValueError, RecursionError):  # damaged by a run that was killed
                self._add(json.loads(line))

    def _add(self, record: Any) -> None:
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            return
        if record["step"] == 0:
            self._shift = 1  # a run of long ago, which counted from 0
        step = record["step"] + self._shift
        if step <= self.last:
            return
        point = Point(step, self._time(step, record), dict(_numbers(record)))
        text = f"{self._digests[-1]}{step}{sorted(point.stable.items())}"
        self._digests.append(hashlib.sha256(text.encode()).hexdigest()[:16])
        self._steps.append(step)
        self.last = step
        if step > self.safe:
            self.points.append(point)

    def _time(self, step: int, record: Mapping[str, Any]) -> float:
        """When the step ended: the start that it belongs to, and the seconds of the steps since."""
        start = max((i for i, (before, _) in enumerate(self._starts) if before < step), default=0)
        if start != self._start:
            self._start, self._seconds = start, 0.0
        rate, tokens = record.get("tokens_per_s"), record.get("tokens")
        if isinstance(rate, int | float) and isinstance(tokens, int | float) and rate > 0:
            self._seconds += tokens / rate
        return round(self._starts[start][1] + self._seconds, 3)


def starts_of(folder: Path) -> list[tuple[int, float]]:
    """(updates made before, Unix time) of each start, at least one."""
    starts = [
        (line["step"], float(line["at"]))
        for line in history_of(folder)
        if line["event"] == "start" and isinstance(line.get("step"), int)
    ]
    with suppress(OSError):
        return starts or [(0, (folder / CONFIG).stat().st_mtime)]
    return starts or [(0, 0.0)]


def _numbers(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """All finite numbers of a line by name, those of a table within it as `time/forward`."""
    for key, value in record.items():
        if key in _LEFT_OUT and not prefix:
            continue
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{key}/")
        elif is_number(value) and math.isfinite(value):
            yield _ODD.sub("_", f"{prefix}{key}"), float(value)


def tracked(folder: Path, step: int, generation: int = 1, over: bool = False) -> TrackedRun:
    """The run in a folder, after `step` steps. over: its process ends now, whatever the folder's lock says. Nothing
    that is absent or damaged raises."""
    config, history = toml_of_run(folder / CONFIG), history_of(folder)
    name = str(config.get("name", folder.parent.name))
    recipe = dict(_flat({key: value for key, value in config.items() if key != "plan"}))
    git = next((line["git"] for line in reversed(history) if isinstance(line.get("git"), dict)), None)
    git = git or json_of(folder / "env.json").get("git") or {}
    data = next((str(line["data"]) for line in reversed(history) if line.get("data")), "")
    tags = {"run": f"{name}/{folder.name}", "plan": str(config.get("plan", "")), "data": data,
            "commit": str(git.get("commit", ""))}  # fmt: skip
    steps = recipe.get("train.steps", 0)
    state = state_of(folder, history, step, steps if isinstance(steps, int) else 0)
    if over and state == "running":
        last = next((line for line in reversed(history) if line["event"] in ("start", "end")), {"event": ""})
        whole = step >= int(steps) or last.get("early")
        state = "failed" if last["event"] != "end" else "done" if whole else "stopped"
    saved = max((path.parent.name for path in folder.glob(f"{CHECKPOINTS}/step-*/manifest.json")), default="")
    return TrackedRun(
        folder=folder,
        name=name,
        key=f"{name}-{folder.name}" + (f"-{generation}" if generation > 1 else ""),
        began=starts_of(folder)[0][1],
        recipe=recipe,
        tags={key: value for key, value in tags.items() if value},
        state=state,
        saved=f"{CHECKPOINTS}/{saved}" if saved else "",
    )


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str | int | float | bool]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            plain = isinstance(value, str | int | float | bool)
            yield f"{prefix}{key}", value if plain else json.dumps(value, default=str)
