"""Weights & Biases, offline or online."""

from typing import Literal

from pydantic import Field

from unisono_contrib.trackers import TrackedRun, Tracker, TrackerConnection


class WandbTracker(Tracker):
    """Weights & Biases: offline in the run folder, for `wandb sync` to send, or online."""

    name = "wandb"
    main = "project"
    needs = ("wandb",)
    extra = "wandb"

    project: str = Field(default="", description="its name; absent: that of the recipe")
    mode: Literal["offline", "online"] = Field(
        default="offline", description="online: sent to W&B at once; `wandb login` before"
    )

    def connect(self, run: TrackedRun) -> TrackerConnection:
        from unisono_contrib.train.sinks._wandb import WandbRun

        return WandbRun(run, self.project or run.name, self.mode)
