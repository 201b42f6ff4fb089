"""The loop of a sweep: ask the method what to train, start it where there is room, write down what came of it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.config import Loaded
from unisono.config.write import recipe_toml
from unisono.observe.files import write_whole
from unisono.spec.errors import UsageError
from unisono.spec.words import number
from unisono_contrib.sweep.journal import SweepJournal, lines
from unisono_contrib.sweep.methods import End, New, Train
from unisono_contrib.sweep.places import TrialPlace, Workers
from unisono_contrib.sweep.progress import State, SweepProgress, Trial, replay
from unisono_contrib.sweep.room import Need, TrialRoom, free_gpus, need_of, only_gpus
from unisono_contrib.sweep.space import Params
from unisono_contrib.sweep.spec import SweepSpec
from unisono_contrib.sweep.trial import RECIPE, PieceOutcome, TrialJob, branch, variables


@dataclass
class Sweep:
    """A sweep under way. note: hears what happens. taken: what each trial that trains has of the machine."""

    spec: SweepSpec
    folder: Path
    room: TrialRoom
    workers: int
    note: Callable[[str], None]
    progress: SweepProgress
    journal: SweepJournal
    taken: dict[int, tuple[Need, tuple[str, ...]]] = field(default_factory=dict)
    waits: str = ""

    def run(self, place: TrialPlace) -> SweepProgress:
        """Train until the method has nothing more to do. Raises KeyboardInterrupt and Stopped as they come: the same
        sweep goes on later."""
        for trial in self.progress.trials:
            if trial.piece is not None:  # of a sweep that was killed
                self._write(event="stopped", trial=trial.number)
        grace = self.spec.base.recipe.launch.grace
        with place.open(grace) as workers:
            while True:
                self._fill(workers)
                if not self.taken:
                    return self.progress
                for trial, outcome in workers.ended():
                    self._hear(self.progress.trials[trial], outcome)

    def _fill(self, workers: Workers) -> None:
        """Start what the method decides, as long as there is room for it."""
        while len(self.taken) < self.workers:
            decision = self.spec.method.decide(self.progress, self.folder)
            match decision:
                case None:
                    return
                case New(params):
                    self._write(event="new", trial=len(self.progress.trials), params=dict(params))
                case End(trial, state):
                    self._write(event="end", trial=trial, state=state)
                case Train() if not self._train(decision, workers):
                    return

    def _train(self, train: Train, workers: Workers) -> bool:
        """Start a piece; False where it has to wait for room."""
        trial = self.progress.trials[train.trial]
        params = trial.params if train.params is None else train.params
        try:
            loaded = self._loaded(trial, params)
            need = need_of(loaded, self.room)
        except UsageError as error:  # values that do not go with each other: of this trial alone
            self._end(trial, State.FAILED, error.what)
            return True
        if why := self.room.why_not(need, (other for other, _ in self.taken.values())):
            if why != self.waits:
                self.note(
                    f"note  {len(self.taken)} at a time instead of {self.workers}: there are no {why} for more"
                )
            self.waits = why
            return False
        gpus = free_gpus(self.room, (gpu for _, gpus in self.taken.values() for gpu in gpus), need.gpus)
        more = {"source": list(train.piece.source), "params": dict(params)} if train.piece.source else {}
        self._write(event="start", trial=trial.number, until=train.piece.until, **more)
        folder = self.folder / trial.name
        if train.piece.source is not None:
            other, step = train.piece.source
            branch(Path(self.progress.trials[other].run_dir), step, folder)
        write_whole(
            folder / RECIPE, recipe_toml(loaded.recipe, dict(loaded.origins), [f"# {trial.name} of a sweep"])
        )
        self.taken[trial.number] = need, gpus
        environ = {**variables(self.spec.environ), **only_gpus(gpus)}
        grace = loaded.recipe.launch.grace
        metric = self.spec.config.metric
        workers.start(TrialJob(trial.number, str(folder), train.piece.until, metric, grace, environ), need)
        return True

    def _loaded(self, trial: Trial, params: Params) -> Loaded:
        """The recipe of a trial, whose runs lie in the sweep's folder; no report is drawn for each. Where the recipe
        leaves the threads open, trials side by side share the cores. Raises ConfigProblems."""
        params = {**self.spec.method.fixed(self.progress), **params}
        ours = [("out.dir", str(self.folder)), ("name", trial.name), ("out.report", "false")]
        loaded = self.spec.loaded(params, ours)
        if loaded.origins["launch.threads_per_rank"] != "default":
            return loaded
        world = loaded.plan.fill(loaded.recipe.launch.ranks).world
        threads = max(1, self.room.cores // (self.workers * world))
        return self.spec.loaded(params, [*ours, ("launch.threads_per_rank", str(threads))])

    def _hear(self, trial: Trial, outcome: PieceOutcome) -> None:
        """Write down how a piece has ended."""
        del self.taken[trial.number]
        if outcome.stopped:
            self._write(event="stopped", trial=trial.number)
        elif outcome.run_dir:
            step = outcome.step or self.progress.steps
            self._write(
                event="value", trial=trial.number, step=step, value=outcome.value, run_dir=outcome.run_dir,
                seconds=round(outcome.seconds, 3),
            )  # fmt: skip
            more = f"  {outcome.why}" if outcome.why else ""
            value = number(outcome.value) if outcome.value is not None else "no number"
            self.note(f"{trial.name}  step {step}  {self.spec.config.metric} {value}{more}")
        else:
            self._write(event="failure", trial=trial.number, why=outcome.why)
            tries = trial.failures + 1
            again = outcome.again and tries <= self.spec.config.retries
            self.note(f"{trial.name}  failed ({outcome.why}){', and is tried again' if again else ''}")
            if not again:
                self._end(trial, State.FAILED, outcome.why)

    def _end(self, trial: Trial, state: State, why: str = "") -> None:
        self._write(event="end", trial=trial.number, state=state, why=why)

    def _write(self, **line: Any) -> None:
        """A line of the journal, and what follows from it."""
        self.journal.write({**line, "at": round(time.time(), 3)})
        self.progress = self.progress.after(line)


def begun(spec: SweepSpec, folder: Path) -> SweepProgress:
    """The progress of a sweep as its folder tells it; that of a new one where there is no journal."""
    return replay(spec.progress, lines(folder))
