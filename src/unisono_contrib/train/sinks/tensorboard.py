"""TensorBoard: event files."""

from pydantic import Field

from unisono_contrib.trackers import TrackedRun, Tracker, TrackerConnection


class TensorBoardTracker(Tracker):
    """Event files for TensorBoard: `tensorboard --logdir runs` shows all runs below a folder."""

    name = "tensorboard"
    main = "dir"
    takes_path = True
    needs = ("tensorboardX",)
    extra = "tensorboard"

    dir: str = Field(
        default="", description="folder for the runs' event files; absent: the run folder itself"
    )

    def connect(self, run: TrackedRun) -> TrackerConnection:
        from unisono_contrib.train.sinks._tensorboard import EventFiles

        return EventFiles(run, self.dir)
