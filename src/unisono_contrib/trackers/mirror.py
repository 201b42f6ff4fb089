"""A tracker brought up to date from a run folder: each point once, whatever fails in between. No torch.

Where the tracker has got to is asked of the tracker itself when it is connected: a request that failed may have done
its work all the same. `trackers/NAME.json` in the run folder says only up to which step it need not be asked.
"""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from unisono.observe.files import write_whole
from unisono_contrib.trackers import Point, TrackedRun, Tracker, TrackerConnection
from unisono_contrib.trackers.run_folder import StepReader, tracked

FOLDER = "trackers"
BATCH = 200  # steps in one request


@dataclass(frozen=True, slots=True)
class Cursor:
    """What is known of a tracker. generation: 1, and one more each time the run's history was rewritten. safe: all
    steps up to this one are in the tracker. digest: of their stable numbers, by which a rewritten history is known."""

    generation: int = 1
    safe: int = 0
    digest: str = ""


class TrackerMirror:
    """One tracker and one run folder. Its methods raise what the tracker raises; then `drop` it and try again."""

    def __init__(self, tracker: Tracker, folder: Path) -> None:
        self.tracker, self.path = tracker, folder / FOLDER / f"{tracker.name}.json"
        self.cursor = _read(self.path)
        self.steps = StepReader(folder, self.cursor.safe)
        self._connection: TrackerConnection | None = None
        self._held: Mapping[int, Mapping[str, float]] = {}
        self._sent: list[Point] = []  # since the connection was made
        self._shown: TrackedRun | None = None

    @property
    def behind(self) -> int:
        """Steps of the run folder that the tracker has not got, as far as it is known."""
        return len(self.steps.points)

    def catch_up(self, final: bool = False) -> None:
        """Send what the tracker has not got. final: no more steps are made now. Raises any exception.

        A resumed run makes some steps again. Until it has made all of those that the tracker has, nothing is sent. If
        they are the same as before, and with exact resumption they are, they are not sent again; else the tracker's
        run is rewritten from the beginning.
        """
        self.steps.read()
        run = tracked(self.steps.folder, self.steps.last, self.cursor.generation, final)
        connection = self._connection or self._connect(run)
        highest = max([self.cursor.safe, *self._held, *(point.step for point in self._sent[-1:])])
        if self.steps.last < highest and not final:
            return
        if self.steps.last < highest or self._is_rewritten():
            self._rewrite(connection)
            return self.catch_up(final)
        due = list(self.steps.points)
        done = self._sent[-1].step if self._sent else 0
        for first in range(0, len(due), BATCH):
            batch = due[first : first + BATCH]
            if missing := [p for point in batch if point.step > done and (p := self._missing(point))]:
                connection.send(missing)
            self._sent.extend(point for point in batch if point.step > done)
            self._note(connection.received(batch[-1].step))
        if run != self._shown:
            connection.describe(run)
            self._shown = run
        if final:
            self._end(connection)

    def _connect(self, run: TrackedRun) -> TrackerConnection:
        connection = self.tracker.connect(run)
        self._connection, self._held = connection, connection.held(self.cursor.safe)
        return connection

    def _missing(self, point: Point) -> Point | None:
        """What the tracker has not got of a point."""
        held = self._held.get(point.step, {})
        values = {name: value for name, value in point.values.items() if name not in held}
        return replace(point, values=values) if values else None

    def _is_rewritten(self) -> bool:
        """Whether steps that the tracker has are others now."""
        if self.cursor.safe and self.steps.digest(self.cursor.safe) != self.cursor.digest:
            return True
        if not self._held and not self._sent:
            return False
        known = {point.step: point.stable for point in self.steps.points}
        held = {**self._held, **{point.step: point.stable for point in self._sent}}
        return any(
            not math.isclose(value, known[step][name], rel_tol=1e-5)  # some trackers keep 32 bits
            for step, values in held.items()
            if step > self.cursor.safe
            for name, value in values.items()
            if name in known.get(step, {})
        )

    def _rewrite(self, connection: TrackerConnection) -> None:
        connection.forget()
        self._write(Cursor(self.cursor.generation + 1))
        self.drop()

    def _note(self, safe: int) -> None:
        if safe > self.cursor.safe:
            self._write(replace(self.cursor, safe=safe, digest=self.steps.digest(safe)))
            self._sent = [point for point in self._sent if point.step >= safe]
            self._held = {step: values for step, values in self._held.items() if step > safe}

    def _end(self, connection: TrackerConnection) -> None:
        connection.close()
        self._note(self.steps.last)
        self.drop()

    def _write(self, cursor: Cursor) -> None:
        write_whole(self.path, json.dumps(asdict(cursor)))
        self.cursor = cursor
        self.steps.forget(cursor.safe)

    def drop(self) -> None:
        """Let go of a tracker that failed, or whose run is over."""
        connection, self._connection = self._connection, None
        self._held, self._sent, self._shown = {}, [], None
        if connection is not None:
            with suppress(Exception):  # it failed already, or has been closed
                connection.close()


def _read(path: Path) -> Cursor:
    with suppress(OSError, ValueError, TypeError):
        return Cursor(**json.loads(path.read_text(encoding="utf-8")))
    return Cursor()
