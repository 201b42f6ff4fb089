"""Trackers: programs that show the curves of many runs, such as MLflow. Each is a follower of the run folder.

The run writes `metrics.jsonl` and knows nothing of trackers. A process of its own, the follower, reads what stands in
the run folder and sends it on (`follow`). So a tracker that is slow, hung or gone costs the run nothing: what it has
not got waits in the folder, and `unisono sync RUN --to NAME` sends it later by the same code.

    class MLflowTracker(Tracker):        one file of `train/sinks`, with the options that the recipe may give
        name = "mlflow"
        def connect(self, run): ...      imports MLflow, in the follower alone
"""

import importlib.util
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from unisono.spec.errors import UsageError
from unisono.spec.finder import contributed
from unisono.spec.sink import SINKS, Observer, RunFacts, Sink

STABLE = ("loss", "lr", "grad_norm", "tokens")
"""Numbers of a step that are the same whenever the step is made again; its timings are not."""


@dataclass(frozen=True, slots=True)
class Point:
    """The numbers of one step. step: the first is 1. at: Unix time in seconds at which it ended, as computed from
    the run folder, so that it is the same whenever the folder is read. values: by name, all finite."""

    step: int
    at: float
    values: Mapping[str, float]

    @property
    def stable(self) -> dict[str, float]:
        """Those values that do not depend on when the step was made."""
        return {k: v for k, v in self.values.items() if k in STABLE or k.startswith("val_")}


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run as trackers show it.

    folder: the run folder. name: of its recipe. key: names the run in the tracker, `NAME-ID`; with `-2` behind it after
    its history was rewritten once. began: Unix time of its first start. recipe: values by dotted key. tags: `plan`,
    `run`, `commit`, `data`. state: running, done, stopped, failed or lost. saved: its newest checkpoint,
    `checkpoints/step-000200`, or "".
    """

    folder: Path
    name: str
    key: str
    began: float
    recipe: Mapping[str, str | int | float | bool]
    tags: Mapping[str, str]
    state: str
    saved: str


class TrackerConnection(ABC):
    """A tracker that is open for one run. Any exception means that it cannot be reached now: the follower closes it,
    waits, and connects anew. So a method may have done a part of its work when it raises."""

    @abstractmethod
    def held(self, after: int) -> Mapping[int, Mapping[str, float]]:
        """What the tracker has of steps above `after`, read back from the tracker itself: step → name → value."""

    @abstractmethod
    def send(self, points: Sequence[Point]) -> None:
        """Add these points, in the order of their steps, none of which is there yet."""

    @abstractmethod
    def describe(self, run: TrackedRun) -> None:
        """Show state and newest checkpoint of the run. Called when they have changed."""

    @abstractmethod
    def forget(self) -> None:
        """Take the run away with all its points, where the tracker can: its history is sent again under another key."""

    def received(self, sent: int) -> int:
        """The last step that is safe in the tracker, where steps up to `sent` were sent."""
        return sent

    def close(self) -> None:
        """Let go of the tracker. After it, everything sent is safe there, or it raises."""
        return None


class Tracker(Sink, ABC):
    """A tracker's declaration. needs: the modules it imports. extra: of ours, which installs them."""

    follows = True
    needs: ClassVar[tuple[str, ...]]
    extra: ClassVar[str]

    @abstractmethod
    def connect(self, run: TrackedRun) -> TrackerConnection:
        """Find the run in the tracker by its key, or add it. Raises any exception if it cannot be reached."""

    def require(self) -> None:
        """Raises UsageError E01 where a module that it needs is not installed."""
        for module in self.needs:
            if importlib.util.find_spec(module) is None:
                raise UsageError(
                    f"tracker {self.name} needs the module {module}, which is not installed",
                    where="out.track",
                    fix=f'pip install "unisono[{self.extra}]"; or out.track without it:'
                    f" unisono sync RUN --to {self.name} sends the run later",
                    code="E01",
                )

    def text(self) -> str:
        """The declaration as a recipe writes it, `mlflow:uri=http://host:5000`."""
        options = ",".join(
            f"{k}={v}" for k, v in self.model_dump().items() if v != type(self).model_fields[k].default
        )
        name = (
            self.name
            if self.name in SINKS.names()
            else f"{inspect.getfile(type(self))}:{type(self).__name__}"
        )
        return f"{name}:{options}" if options else name

    def open(self, run: RunFacts) -> Observer:
        self.require()
        return contributed("unisono.trackers.follower").following(self, run)
