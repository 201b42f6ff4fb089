"""What is known of all trials of a sweep: a value that follows from its journal.

A trial is trained piece by piece. Each piece goes on from the checkpoint of the one before until a step, and ends with
a value of the sweep's metric there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from unisono_contrib.sweep.space import Params, Space


class State(StrEnum):
    """What a trial has come to. open: it is not over."""

    OPEN = "open"
    DONE = "done"
    PRUNED = "pruned"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Piece:
    """Training of a trial until a step; 0: until the recipe's last. source: the trial from whose checkpoint it begins,
    where that is another one, and the step of the checkpoint."""

    until: int = 0
    source: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of the recipe with values of its own.

    values: (step, metric) at the end of each piece; None where the metric is no number. piece: that trains, or was
    under way when the sweep was killed. failures: pieces that failed. why: the last failure in a line. source: the
    trial and step that it went on from last, if those were another's.
    """

    number: int
    params: Params
    state: State = State.OPEN
    values: tuple[tuple[int, float | None], ...] = ()
    piece: Piece | None = None
    failures: int = 0
    run_dir: str = ""
    why: str = ""
    source: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """`trial-003`, of its folder and of its runs."""
        return f"trial-{self.number:03}"

    @property
    def step(self) -> int:
        """The step that it has come to."""
        return self.values[-1][0] if self.values else 0

    @property
    def value(self) -> float | None:
        """The metric at `step`."""
        return self.values[-1][1] if self.values else None

    @property
    def is_idle(self) -> bool:
        """Whether it is neither over nor training."""
        return self.state is State.OPEN and self.piece is None

    def at(self, step: int) -> float | None:
        """The metric at a step at which a piece ended; None where there is no number."""
        return next((value for reached, value in reversed(self.values) if reached == step), None)

    def reached(self, step: int) -> bool:
        """Whether a piece of it ended at this step."""
        return any(at == step for at, _ in self.values)


@dataclass(frozen=True, slots=True)
class SweepProgress:
    """All trials of a sweep, and what a method needs to decide. steps, lr, batch: of the recipe that all
    share. wanted: trials. goal: min or max."""

    space: Space
    steps: int
    wanted: int
    seed: int = 0
    goal: str = "min"
    lr: float = 1e-3
    batch: int = 1
    trials: tuple[Trial, ...] = field(default=())

    def cost(self, value: float | None) -> float:
        """A metric as a number of which less is better; none is worse than all."""
        if value is None or value != value:
            return float("inf")
        return -value if self.goal == "max" else value

    @property
    def best(self) -> Trial | None:
        """The best trial of those that came farthest; None where no trial has a value."""
        valued = [trial for trial in self.trials if trial.value is not None]
        done = [trial for trial in valued if trial.state is State.DONE]
        return min(done or valued, key=lambda trial: (self.cost(trial.value), trial.number), default=None)

    @property
    def is_running(self) -> bool:
        """Whether a trial trains."""
        return any(trial.piece is not None for trial in self.trials)

    def after(self, line: Mapping[str, Any]) -> "SweepProgress":
        """The progress after one more line of the journal."""
        if line["event"] == "new":
            trial = Trial(line["trial"], line["params"])
            return replace(self, trials=(*self.trials, trial))
        number = line["trial"]
        changed = _changed(self.trials[number], line)
        return replace(self, trials=(*self.trials[:number], changed, *self.trials[number + 1 :]))


def replay(progress: SweepProgress, lines: Sequence[Mapping[str, Any]]) -> SweepProgress:
    """The progress after all lines of a journal."""
    for line in lines:
        progress = progress.after(line)
    return progress


def _changed(trial: Trial, line: Mapping[str, Any]) -> Trial:
    """A trial after a line of the journal about it."""
    match line["event"]:
        case "start":
            source = tuple(line["source"]) if line.get("source") else None
            params = line.get("params", trial.params)
            return replace(
                trial, piece=Piece(line["until"], source), params=params, source=source or trial.source
            )
        case "value":
            values = (*trial.values, (line["step"], line["value"]))
            return replace(trial, values=values, piece=None, run_dir=line["run_dir"])
        case "failure":
            return replace(trial, piece=None, failures=trial.failures + 1, why=line["why"])
        case "stopped":
            return replace(trial, piece=None)
        case "end":
            return replace(trial, piece=None, state=State(line["state"]), why=line.get("why", trial.why))
    raise ValueError(f"no event of a sweep: {line['event']!r}")
