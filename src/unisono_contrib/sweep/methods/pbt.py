"""Population-based training (Jaderberg et al., Population based training of neural networks, 2017).

All members train at once, a generation of `interval` steps after the other. After each, one of the worst takes over the
checkpoint of one of the best (exploit) and trains on with values near those of that one (explore). A generation begins
when all members have ended the one before, so what happens does not depend on the number of workers.
"""

import random
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from unisono.spec.training import Count
from unisono_contrib.sweep.methods import Decision, End, New, SearchMethod, Train, idle
from unisono_contrib.sweep.progress import Piece, State, SweepProgress, Trial
from unisono_contrib.sweep.space import Params, drawn, explored


class PopulationBased(SearchMethod):
    """A population whose worst members take over weights of the best, with values near theirs."""

    name: ClassVar[str] = "pbt"
    pieces: ClassVar[bool] = True
    resumes: ClassVar[bool] = True

    interval: Count | None = Field(
        default=None, description="steps of a generation; a tenth of the recipe's when absent"
    )
    quantile: float = Field(
        default=0.25,
        gt=0.0,
        le=0.5,
        description="share of the population that is replaced, and that is copied",
    )

    def misfit(self, progress: SweepProgress) -> str:
        return "" if progress.wanted >= 2 else "a population has two members at least: trials = 8"

    def propose(self, progress: SweepProgress, folder: Path) -> Params:
        return drawn(progress.space, progress.seed, len(progress.trials))

    def decide(self, progress: SweepProgress, folder: Path) -> Decision | None:
        if len(progress.trials) < progress.wanted:
            return New(self.propose(progress, folder))
        interval = self.interval or max(1, progress.steps // 10)
        waiting = idle(progress)
        for trial in waiting:
            if trial.step >= progress.steps:
                return End(trial.number, State.DONE)
        if progress.is_running and any(
            t.piece and t.step < waiting[0].step for t in progress.trials if waiting
        ):
            return None
        # Those that copy begin first: what they copy has not moved on, and is still on disk.
        pieces = [
            self._next(progress, trial, trial.step + interval)
            for trial in waiting
            if trial.step == waiting[0].step
        ]
        return min(pieces, key=lambda train: (train.piece.source is None, train.trial), default=None)

    def _next(self, progress: SweepProgress, trial: Trial, until: int) -> Train:
        """The next piece of a member: of its own run, or from a better one's checkpoint."""
        until = min(progress.steps, until)
        ranked = sorted(
            (other for other in progress.trials if other.reached(trial.step)),
            key=lambda other: (progress.cost(other.at(trial.step)), other.number),
        )
        share = max(1, int(self.quantile * len(ranked)))
        if len(ranked) < 2 * share or trial not in ranked[-share:]:
            return Train(trial.number, Piece(until))
        rng = random.Random(f"pbt/{progress.seed}/{trial.number}/{trial.step}")
        better = rng.choice(ranked[:share])
        params = explored(progress.space, better.params, rng)
        return Train(trial.number, Piece(until, (better.number, trial.step)), params)
