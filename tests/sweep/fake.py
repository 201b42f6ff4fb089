"""Sweeps whose trials are functions: a place in memory, and a sweep's files."""

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unisono.config.toml import toml_of
from unisono_contrib.sweep import journal
from unisono_contrib.sweep.places import TrialPlace
from unisono_contrib.sweep.progress import SweepProgress
from unisono_contrib.sweep.room import Need, TrialRoom
from unisono_contrib.sweep.schedule import Sweep, begun
from unisono_contrib.sweep.spec import SweepSpec, read
from unisono_contrib.sweep.trial import CHECKPOINTS, RECIPE, PieceOutcome, TrialJob

RECIPE_TEXT = """\
name = "base"
[model]
kind = "mlp"
[data]
source = "digits"
[train]
steps = {steps}
global_batch = 8
"""
LR = '"train.lr" = {low = 1e-4, high = 1.0, log = true}'


class Killed(BaseException):
    """The sweep, in the middle of something."""


class FakePlace(TrialPlace):
    """Trials that cost nothing. curve: the metric by the trial's recipe and the step. fails: what a piece comes to
    instead, by (trial, how many pieces of it were started); seed: of the order in which pieces end. most: pieces that end
    before the sweep is killed."""

    name = "fake"

    def __init__(
        self,
        curve: Callable[[Mapping[str, Any], int], float | None],
        fails: Mapping[tuple[int, int], PieceOutcome] | None = None,
        seed: int = 0,
        most: int = 10**6,
    ) -> None:
        self.curve, self.fails, self.rng, self.most = curve, fails or {}, random.Random(seed), most
        self.started, self.together = list[TrialJob](), 0
        self.running = dict[int, TrialJob]()

    @contextmanager
    def open(self, grace: float) -> Iterator["FakePlace"]:
        self.running.clear()
        yield self

    def start(self, job: TrialJob, need: Need) -> None:
        self.started.append(job)
        self.running[job.number] = job
        self.together = max(self.together, len(self.running))

    def ended(self) -> Iterator[tuple[int, PieceOutcome]]:
        if not self.most:
            raise Killed
        self.most -= 1
        number = self.rng.choice(sorted(self.running))
        job = self.running.pop(number)
        tries = sum(other.number == number for other in self.started)
        yield number, self.fails.get((number, tries)) or self._trained(job)

    def _trained(self, job: TrialJob) -> PieceOutcome:
        recipe = toml_of((Path(job.folder) / RECIPE).read_text())
        step = job.until or recipe["train"]["steps"]
        run = Path(job.folder) / "run"
        (run / CHECKPOINTS / f"step-{step:06d}").mkdir(parents=True, exist_ok=True)
        for name in ("config.resolved.toml", "env.json"):
            (run / name).touch()
        return PieceOutcome(step, self.curve(recipe, step), str(run))


def spec_in(place: Path, said: str, space: str = LR, steps: int = 64, **changed: Any) -> SweepSpec:
    """A sweep's file with its recipe, read. said: lines of `[sweep]`."""
    (place / "base.toml").write_text(RECIPE_TEXT.format(steps=steps))
    file = place / "search.toml"
    file.write_text(f'[sweep]\nrecipe = "base.toml"\n{said}\n[sweep.space]\n{space}\n')
    return read(file, [], {}, **changed)


def searched(
    spec: SweepSpec, folder: Path, place: FakePlace, workers: int = 2, room: TrialRoom | None = None
) -> SweepProgress:
    """Play a sweep to its end, or until it is killed."""
    folder.mkdir(exist_ok=True)
    log = journal.SweepJournal(folder)
    room = room or TrialRoom(64, 1e15)
    try:
        return Sweep(spec, folder, room, workers, lambda text: None, begun(spec, folder), log).run(place)
    finally:
        log.close()


def bowl(recipe: Mapping[str, Any], step: int) -> float:
    """A loss that falls with the steps and is least at a learning rate of 0.01."""
    return abs(math.log10(recipe["train"]["lr"]) + 2) + 1 / step
