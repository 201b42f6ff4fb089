"""Asynchronous successive halving (Li et al., A system for massively parallel hyperparameter tuning, 2018).

Every trial is trained to the first rung. Whenever a worker is free, a trial that is among the best 1/eta of its rung
goes on to the next one, from its checkpoint. So nobody waits until a rung is full, and nothing is decided for good
before the end: a trial that was passed over goes on once it is among the best.
"""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from unisono.spec.training import Count
from unisono_contrib.sweep.methods import METHODS, Decision, End, New, SearchMethod, Train
from unisono_contrib.sweep.progress import Piece, State, SweepProgress, Trial
from unisono_contrib.sweep.space import Params


class SuccessiveHalving(SearchMethod):
    """All trials begin; at each rung the best 1/eta of them go on."""

    name: ClassVar[str] = "asha"
    pieces: ClassVar[bool] = True

    eta: int = Field(default=4, ge=2, description="one of so many trials goes on at a rung")
    min_steps: Count | None = Field(
        default=None, description="steps of the first rung; the recipe's over eta² when absent"
    )
    sampler: Literal["random", "tpe"] = Field(
        default="random", description="how values are drawn: random | tpe"
    )

    def rungs(self, steps: int) -> tuple[int, ...]:
        """The steps of all rungs; the last is the recipe's last step."""
        rung = self.min_steps or max(1, steps // self.eta**2)
        rungs = []
        while rung < steps:
            rungs.append(rung)
            rung *= self.eta
        return (*rungs, steps)

    def propose(self, progress: SweepProgress, folder: Path) -> Params:
        return METHODS.find(self.sampler)().propose(progress, folder)

    def decide(self, progress: SweepProgress, folder: Path) -> Decision | None:
        rungs = self.rungs(progress.steps)
        for trial in progress.trials:
            if trial.is_idle and trial.step >= progress.steps:
                return End(trial.number, State.DONE)
            if trial.is_idle and not trial.values:  # its first piece failed, or was stopped
                return Train(trial.number, Piece(rungs[0]))
        for at in reversed(range(len(rungs) - 1)):
            trial = self._promoted(progress, rungs[at])
            if trial is not None:
                return Train(trial.number, Piece(rungs[at + 1]))
        if len(progress.trials) < self.count(progress):
            return New(self.propose(progress, folder))
        if progress.is_running:
            return None
        return _ending(progress, rungs)

    def _promoted(self, progress: SweepProgress, rung: int) -> Trial | None:
        """The best trial that waits at a rung and is among the best 1/eta of all that have come there."""
        there = _ranked(progress, rung)
        return next((t for t in there[: len(there) // self.eta] if t.is_idle and t.step == rung), None)


def _ranked(progress: SweepProgress, rung: int) -> list[Trial]:
    """Trials that have come to a rung with a number, the best first."""
    there = [trial for trial in progress.trials if trial.at(rung) is not None]
    return sorted(there, key=lambda trial: (progress.cost(trial.at(rung)), trial.number))


def _ending(progress: SweepProgress, rungs: tuple[int, ...]) -> Decision | None:
    """Nothing trains, and no rung is full enough: the best of the highest one goes on all the same, so that one trial
    at least is trained to the end. The others are over."""
    farthest = max((trial.step for trial in progress.trials), default=0)
    ranked = _ranked(progress, farthest)
    if farthest in rungs[:-1] and ranked and ranked[0].is_idle:
        return Train(ranked[0].number, Piece(rungs[rungs.index(farthest) + 1]))
    return next((End(t.number, State.PRUNED) for t in progress.trials if t.is_idle), None)
