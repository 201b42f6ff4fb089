"""A run in trackio's database (TRACKIO_DIR, by default in ~/.cache). Its own server writes by the same class; a row
that has the `log_id` of one that is there is ignored by the database."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore

from unisono_contrib.trackers import Point, TrackedRun, TrackerConnection


class TrackioRun(TrackerConnection):
    """One run of a project."""

    def __init__(self, run: TrackedRun, project: str) -> None:
        self._project, self._key, self._run = project, run.key, run
        SQLiteStorage.init_db(project)

    def held(self, after: int) -> Mapping[int, Mapping[str, float]]:
        rows = SQLiteStorage.get_logs(self._project, self._key, run_id=self._key)
        return {
            row["step"]: {k: v for k, v in row.items() if isinstance(v, int | float) and k != "step"}
            for row in rows
            if row["step"] > after
        }

    def send(self, points: Sequence[Point]) -> None:
        SQLiteStorage.bulk_log(
            self._project,
            self._key,
            [dict(point.values) for point in points],
            steps=[point.step for point in points],
            timestamps=[datetime.fromtimestamp(point.at, UTC).isoformat() for point in points],
            config=self._config(self._run),
            log_ids=[f"{self._key}:{point.step}" for point in points],
            run_id=self._key,
        )

    def describe(self, run: TrackedRun) -> None:
        """The configuration goes with the next points: trackio keeps none of a run without points."""
        self._run = run

    def forget(self) -> None:
        SQLiteStorage.delete_run(self._project, self._key, run_id=self._key)

    def _config(self, run: TrackedRun) -> dict[str, str | int | float | bool]:
        tags = {f"unisono.{key}": value for key, value in run.tags.items()}
        return {**run.recipe, **tags, "_Created": datetime.fromtimestamp(run.began, UTC).isoformat()}
