"""When checkpoints come: every so many steps, or as often as failures make it worth; and the time of steps and saves.

With `train.save_every = auto` rank 0 chooses the step of the next checkpoint whenever one was saved, by Young's and
Daly's formula (`spec.interval`), and puts it into the store that all ranks met over: nobody's clock decides alone.
"""

import json
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.config import Recipe
from unisono.spec.interval import between_failures, steps_between
from unisono.spec.words import seconds
from unisono.train.state import history

FIRST = 10
"""Steps after which a run that chooses saves first, to see how long that takes."""
_CHANGE = 0.2  # share by which the number of steps has to change to be worth another word


@dataclass(slots=True)
class Clock:
    """How long steps and saves of this run take on this rank, in seconds, by the last of them."""

    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=32))
    _saves: deque[float] = field(default_factory=lambda: deque(maxlen=5))
    _ended: float = 0.0

    def stepped(self, spent: float) -> None:
        """A step has ended."""
        self._steps.append(spent)
        self._ended = time.monotonic()

    def saved(self, spent: float) -> None:
        """Training stood still for a save."""
        self._saves.append(spent)

    def step(self) -> float:
        return statistics.median(self._steps) if self._steps else 0.0

    def saving(self) -> float:
        return statistics.median(self._saves) if self._saves else 0.0

    def next_end(self) -> float | None:
        """When the step under way ends at the latest, as steps go, by the monotonic clock; None while nobody knows."""
        return self._ended + 1.5 * self.step() if len(self._steps) >= 3 else None


@dataclass(slots=True)
class Fixed:
    """Every so many steps; 0: never between the first step and the last."""

    every: int = 0

    def after(self, step: int) -> int:
        """The step after which another comes, as far as is known."""
        return step + self.every if self.every else 1 << 62

    def due(self, step: int) -> bool:
        return bool(self.every) and step % self.every == 0

    def saved(self, step: int) -> str:
        """After a save, on all ranks alike; returns what there is to be told."""
        return ""


@dataclass(slots=True)
class Chosen:
    """Save as often as failures make it worth. rank, store: of this rank, and what all met over. between(): mean
    seconds between failures, and how many of them this run has seen. next: the step after which a checkpoint comes."""

    clock: Clock
    rank: int
    store: Any
    between: Callable[[], tuple[float, int]]
    next: int
    every: int = 0
    _turns: int = 0

    def after(self, step: int) -> int:
        """The step after which another comes, as far as is known."""
        return step + (self.every or FIRST)

    def due(self, step: int) -> bool:
        return step >= self.next

    def saved(self, step: int) -> str:
        """After a save, on all ranks alike; returns what there is to be told. It waits for rank 0."""
        key = f"cadence/{self._turns}"
        self._turns += 1
        if self.rank == 0:
            self.store.set(key, json.dumps(self._choice()))
        every, said = json.loads(self.store.get(key))
        self.every, self.next = every, step + every
        return said

    def _choice(self) -> tuple[int, str]:
        save, step = self.clock.saving(), self.clock.step()
        if not step:  # saved before the first step
            return FIRST, ""
        mtbf, failures = self.between()
        every = steps_between(save, mtbf, step)
        if self.every and abs(every - self.every) <= _CHANGE * self.every:
            return self.every, ""
        seen = f"{failures} seen" if failures else "none seen: launch.mtbf_hours"
        return every, (
            f"a checkpoint every {every} steps, {seconds(every * step)}: sqrt(2 x {seconds(save)} to save x"
            f" {seconds(mtbf)} between failures ({seen})), in Daly's higher order"
        )


def cadence_of(
    recipe: Recipe, run_dir: Path, rank: int, store: Any, clock: Clock, step: int
) -> Fixed | Chosen:
    """When checkpoints of a run come, which begins at `step`. store: that all ranks met over."""

    def between() -> tuple[float, int]:
        past, prior = history.past(run_dir), 3600 * recipe.launch.mtbf_hours
        return between_failures(past.uptime, past.failures, prior), past.failures

    every = recipe.train.save_every
    return Chosen(clock, rank, store, between, step + FIRST) if every == "auto" else Fixed(every)
