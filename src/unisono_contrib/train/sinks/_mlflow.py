"""A run in MLflow, by its client. The run is found by a tag, so that a resumed one goes on in the same."""

import errno
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mlflow import MlflowClient  # pyright: ignore
from mlflow.entities import Metric, Param, Run, RunTag  # pyright: ignore
from mlflow.environment_variables import MLFLOW_TRACKING_URI  # pyright: ignore

from unisono_contrib.trackers import Point, TrackedRun, TrackerConnection

MOST_METRICS, MOST_PARAMS, LONGEST = 1000, 100, 500  # in one request; letters of a value (MLflow, REST API)
ROOM = 4 << 20  # bytes
_KEY = "unisono.key"
_STATES = {"running": "RUNNING", "done": "FINISHED", "stopped": "KILLED"}  # else FAILED


class MLflowRun(TrackerConnection):
    """One run of an experiment."""

    def __init__(self, run: TrackedRun, uri: str, experiment: str) -> None:
        uri = uri or (MLFLOW_TRACKING_URI.get() or "") or str(run.folder.parents[1] / "mlruns")
        uri = uri if ":" in uri else Path(uri).absolute().as_uri()
        self._folder = Path(unquote(urlsplit(uri).path)) if uri.startswith("file:") else None
        self._check_room()
        self._client = MlflowClient(tracking_uri=uri)
        self._run = self._look_up(experiment, run) or self._create(experiment, run)
        self.id: str = self._run.info.run_id

    def _check_room(self) -> None:
        """Raises OSError where a disk is nearly full: a folder in which MLflow ran out of room in the middle of a
        request has empty files, which its own reader refuses ever after, for all runs of the experiment."""
        if self._folder is None:
            return
        there = next(folder for folder in (self._folder, *self._folder.parents) if folder.exists())
        if shutil.disk_usage(there).free < ROOM:
            raise OSError(errno.ENOSPC, f"less than {ROOM >> 20} MiB of room", str(self._folder))

    def _look_up(self, experiment: str, run: TrackedRun) -> Run | None:
        known = self._client.get_experiment_by_name(experiment)
        if known is None:
            return None
        runs = self._client.search_runs([known.experiment_id], f"tags.`{_KEY}` = '{run.key}'")
        return runs[0] if runs else None

    def _create(self, experiment: str, run: TrackedRun) -> Run:
        known = self._client.get_experiment_by_name(experiment)
        place = known.experiment_id if known is not None else self._client.create_experiment(experiment)
        tags = {_KEY: run.key, **{f"unisono.{key}": value for key, value in run.tags.items()}}
        return self._client.create_run(place, round(run.began * 1e3), tags, run_name=run.key)

    def held(self, after: int) -> Mapping[int, Mapping[str, float]]:
        held: dict[int, dict[str, float]] = {}
        for name in self._run.data.metrics:
            for metric in self._client.get_metric_history(self.id, name):
                if metric.step > after:
                    held.setdefault(metric.step, {})[name] = metric.value
        return held

    def send(self, points: Sequence[Point]) -> None:
        self._check_room()
        metrics = [
            Metric(name, value, round(point.at * 1e3), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for first in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self.id, metrics=metrics[first : first + MOST_METRICS])

    def describe(self, run: TrackedRun) -> None:
        self._check_room()
        known = self._run.data.params
        wanted = {key: str(value)[:LONGEST] for key, value in run.recipe.items()}
        params = [Param(key, value) for key, value in wanted.items() if key not in known]
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self.id, params=params[first : first + MOST_PARAMS])
        changed = {f"unisono.now.{k}": v for k, v in wanted.items() if k in known and known[k] != v}
        tags = {**changed, "unisono.saved": run.saved, **{f"unisono.{k}": v for k, v in run.tags.items()}}
        self._client.log_batch(self.id, tags=[RunTag(key, value) for key, value in tags.items()])
        self._run = self._client.get_run(self.id)
        state = _STATES.get(run.state, "FAILED")
        if state == "RUNNING":
            self._client.update_run(self.id, status=state)
        else:
            self._client.set_terminated(self.id, status=state)

    def forget(self) -> None:
        self._client.delete_run(self.id)
