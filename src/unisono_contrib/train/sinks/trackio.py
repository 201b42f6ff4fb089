"""trackio: a local database."""

from pydantic import Field

from unisono_contrib.trackers import TrackedRun, Tracker, TrackerConnection


class TrackioTracker(Tracker):
    """trackio's local database: `trackio show` draws it, `trackio sync` publishes it."""

    name = "trackio"
    main = "project"
    needs = ("trackio",)
    extra = "trackio"

    project: str = Field(default="", description="its name; absent: that of the recipe")

    def connect(self, run: TrackedRun) -> TrackerConnection:
        from unisono_contrib.train.sinks._trackio import TrackioRun

        return TrackioRun(run, self.project or run.name)
