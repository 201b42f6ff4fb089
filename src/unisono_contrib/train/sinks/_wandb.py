"""A run in W&B, by its library, which writes a file of records and, online, sends what stands there.

The library answers before anything is on disk, and says nothing if it never is. So the file is read back: it is a log
of records in blocks of 32 KiB (the layout of LevelDB's log) behind a header of seven bytes.
"""

import json
import shutil
import struct
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import wandb  # pyright: ignore
from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore

from unisono_contrib.trackers import Point, TrackedRun, TrackerConnection

_BLOCK, _HEAD = 32768, 7
_FLUSH = 8.0  # seconds in which its service has written what was logged
_WHOLE, _LAST = 1, 4  # kinds of fragments: a whole record, the last one of a record; 2 and 3: its others


class WandbRun(TrackerConnection):
    """One run of a project. Each connection that sends has a folder of its own, `trackers/wandb/1` and so on, all with
    the run's id, which W&B puts together."""

    def __init__(self, run: TrackedRun, project: str, mode: Literal["offline", "online"]) -> None:
        self._project, self._tracked = project, run
        self._mode: Literal["offline", "online"] = mode
        self._folder = run.folder / "trackers" / "wandb"
        self._run: wandb.Run | None = None
        self._file: RecordFile | None = None
        self._sent = self._safe = 0

    def held(self, after: int) -> Mapping[int, Mapping[str, float]]:
        held: dict[int, dict[str, float]] = {}
        for path in sorted(self._folder.glob(f"*/wandb/*run-*-{self._tracked.key}/*.wandb")):
            for step, values in steps_in(RecordFile(path).read()):
                if step > after:
                    held.setdefault(step, {}).update(values)
        return held

    def send(self, points: Sequence[Point]) -> None:
        run = self._run or self._open()
        for point in points:
            run.log({**point.values, "_timestamp": point.at}, step=point.step)
            self._sent = point.step

    def received(self, sent: int) -> int:
        if self._run is None:  # nothing had to be sent
            return sent
        self._look()
        return self._safe

    def describe(self, run: TrackedRun) -> None:
        self._tracked = run
        if self._run is not None:  # else nothing is to be sent, and a folder without a point helps nobody
            self._run.summary.update({"unisono.saved": run.saved, "unisono.state": run.state})

    def forget(self) -> None:
        self.close()
        for path in self._folder.glob(f"*/wandb/*run-*-{self._tracked.key}"):
            shutil.rmtree(path.parents[1], ignore_errors=True)

    def close(self) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        run.finish(exit_code=1 if self._tracked.state in ("failed", "lost") else 0)
        until = time.monotonic() + _FLUSH
        while (
            self._safe < self._sent and time.monotonic() < until
        ):  # its service writes after it has answered
            self._look()
            time.sleep(0.02)
        if self._safe < self._sent:
            raise OSError(f"W&B's file holds steps up to {self._safe} of {self._sent}")

    def _open(self) -> wandb.Run:
        tracked = self._tracked
        folder = self._folder / str(
            1 + max((int(path.name) for path in self._folder.glob("[0-9]*")), default=0)
        )
        folder.mkdir(parents=True)
        settings = wandb.Settings(
            console="off", x_disable_stats=True, x_disable_meta=True, x_disable_machine_info=True, disable_git=True,
            disable_code=True, disable_job_creation=True, silent=True, init_timeout=10.0,
        )  # fmt: skip
        run = wandb.init(
            project=self._project, id=tracked.key, name=tracked.key, dir=str(folder), resume="allow",
            mode=self._mode, settings=settings, config={**tracked.recipe, "unisono": dict(tracked.tags)},
            allow_val_change=True,
        )  # fmt: skip
        self._run, self._file = run, RecordFile(Path(run.settings.sync_file))
        return run

    def _look(self) -> None:
        """Read on in the file."""
        for step, _ in steps_in(self._file.read()) if self._file is not None else ():
            self._safe = max(self._safe, step)


class RecordFile:
    """The records of a file that may still grow."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._part = path, _HEAD, b""

    def read(self) -> Iterator[Record]:
        """The whole records that came since the last call. One that is damaged ends the file."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return
        base = self._at
        while (at := self._at - base) + _HEAD <= len(data) or _BLOCK - self._at % _BLOCK < _HEAD:
            if (left := _BLOCK - self._at % _BLOCK) < _HEAD:
                if at + left > len(data):
                    return
                self._at += left
                continue
            checksum, size, kind = struct.unpack_from("<IHB", data, at)
            body = data[at + _HEAD : at + _HEAD + size]
            if len(body) < size or zlib.crc32(bytes([kind]) + body) != checksum:
                return
            self._at += _HEAD + size
            self._part += body
            if kind in (_WHOLE, _LAST):
                whole, self._part = self._part, b""
                yield Record.FromString(whole)


def steps_in(records: Iterator[Record]) -> Iterator[tuple[int, dict[str, float]]]:
    """(step, values by name) of the records of a run's history."""
    for record in records:
        if record.WhichOneof("record_type") == "history":
            values = {
                (i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item
            }
            numbers = {k: float(v) for k, v in values.items() if isinstance(v, int | float) and k[:1] != "_"}
            yield int(values.get("_step", record.history.step.num)), numbers
