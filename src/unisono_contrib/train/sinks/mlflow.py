"""MLflow: a server, or a folder."""

from pydantic import Field

from unisono_contrib.trackers import TrackedRun, Tracker, TrackerConnection


class MLflowTracker(Tracker):
    """Runs of an MLflow server, database or folder: parameters, metrics, tags, state."""

    name = "mlflow"
    main = "uri"
    takes_path = True
    needs = ("mlflow",)
    extra = "mlflow"

    uri: str = Field(
        default="",
        description="http://HOST:PORT, sqlite:///FILE or a folder; absent: MLFLOW_TRACKING_URI, or mlruns beside the"
        " folders of all runs",
    )
    experiment: str = Field(default="", description="its name; absent: that of the recipe")

    def connect(self, run: TrackedRun) -> TrackerConnection:
        from unisono_contrib.train.sinks._mlflow import MLflowRun

        return MLflowRun(run, self.uri, self.experiment or run.name)
