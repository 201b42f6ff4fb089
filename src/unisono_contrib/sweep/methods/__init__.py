"""How a sweep decides what to train next, one method a file.

A method is a pure function of what is known: asked again after a kill, it decides the same. So a sweep that is started
again repeats nothing, and what a method decided needs no memory of its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from unisono.report.picture import LineChart
from unisono.spec.family import Family, Member
from unisono_contrib.sweep.progress import Piece, State, SweepProgress, Trial
from unisono_contrib.sweep.space import Params


@dataclass(frozen=True, slots=True)
class New:
    """Begin a trial with these values."""

    params: Params


@dataclass(frozen=True, slots=True)
class Train:
    """Train a piece of a trial; with other values than before where `params` has some."""

    trial: int
    piece: Piece
    params: Params | None = None


@dataclass(frozen=True, slots=True)
class End:
    """A trial is over."""

    trial: int
    state: State


Decision = New | Train | End


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What a sweep came to. params: the best values; None where nothing was learnt. facts: more, for `--json`. said:
    the same in lines."""

    params: Params | None
    facts: Mapping[str, Any]
    said: tuple[str, ...] = ()


class SearchMethod(Member, ABC):
    """A way to search.

    pieces: whether it stops trials on the way, so that all need the same number of steps. resumes: whether it changes
    the values of a trial that has trained, so that keys which a checkpoint fixes cannot be searched.
    """

    pieces: ClassVar[bool] = False
    resumes: ClassVar[bool] = False

    def misfit(self, progress: SweepProgress) -> str:
        """Why this space cannot be searched in this way; "" where it can."""
        return ""

    def fixed(self, progress: SweepProgress) -> Params:
        """Values that all trials get beside those of the space."""
        return {}

    def count(self, progress: SweepProgress) -> int:
        """How many trials there will be at most."""
        return progress.wanted

    def decide(self, progress: SweepProgress, folder: Path) -> Decision | None:
        """What to do now; None where there is nothing to do until a trial ends. folder: the sweep's own."""
        for trial in progress.trials:
            if trial.is_idle:
                return End(trial.number, State.DONE) if trial.values else Train(trial.number, Piece())
        if len(progress.trials) < self.count(progress):
            return New(self.propose(progress, folder))
        return None

    @abstractmethod
    def propose(self, progress: SweepProgress, folder: Path) -> Params:
        """The values of the next trial, whose number is that of the trials that there are."""

    def conclude(self, progress: SweepProgress) -> Conclusion:
        """What came of it."""
        best = progress.best
        return Conclusion(None if best is None else best.params, {})

    def charts(self, progress: SweepProgress) -> Sequence[LineChart | None]:
        """Charts of its own, on the sweep's page."""
        return []


METHODS: Family[SearchMethod] = Family(
    "search method", "unisono_contrib.sweep.methods", SearchMethod, "sweep.method", ("C02", "C02")
)


def idle(progress: SweepProgress) -> list[Trial]:
    """Trials that wait, those that have come least far first."""
    return sorted((t for t in progress.trials if t.is_idle), key=lambda trial: (trial.step, trial.number))
