"""Saving within the grace, where a step is too long for it: the state before the step under way is saved beside it.

A scheduler asks a run to end and kills it some seconds later. Ranks finish their step and save; a step that would
outlast the grace is given up instead. Its forward and backward change nothing that checkpoints keep, so a thread of
each rank shuts the gate before the update (`Run.gate`), hears over the store whether all ranks stand before the same
update, and saves what they hold, while the main thread computes or waits for others. Where some have gone through, all
are let go on for a moment and try again. Whoever finished the step in time saves as ever.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from unisono.spec.errors import UnisonoError
from unisono.train.state.cadence import Clock
from unisono.train.state.run_state import changed_within
from unisono.train.step.run import Run
from unisono.train.watch.journal import Uplink

POLL = 0.5
"""Seconds between two looks at whether the run is to end, on up to 500 ranks; each wakes who holds the store."""
AGAIN = 0.1
_ASKED = "drain/asked"
_SHARE, _MOST = 0.3, 0.7  # of the grace, that are kept for the save


@dataclass(frozen=True, slots=True)
class DrainParts:
    """What a drain works with. save(): on every rank, the state of the last finished step; returns its folder, or what
    was there before where nothing is new. settled(): whether all of that step is written down."""

    run: Run
    clock: Clock
    line: Uplink
    store: Any  # a connection of its own
    world: int
    grace: float
    save: Callable[[], Path | None]
    settled: Callable[[], bool]


class Drain:
    """A context manager around the loop, on every rank: its thread waits for a hurry, and does the above."""

    def __init__(self, parts: DrainParts) -> None:
        self._parts, self._over = parts, threading.Event()
        self._period = max(POLL, parts.world / 1000)
        self._thread = threading.Thread(target=self._watch, name="unisono-drain", daemon=True)

    def __enter__(self) -> Self:
        if self._parts.line.hears:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _watch(self) -> None:
        line, run = self._parts.line, self._parts.run
        with suppress(RuntimeError, OSError):  # the store has gone, and with it the run
            while not line.hurried():
                if self._over.wait(self._period):
                    return
                if self._parts.store.check([_ASKED]):
                    line.hurry()
                    break
            self._parts.store.set(_ASKED, "")
            now = time.monotonic()
            if self._over.wait(max(0.0, due(self._parts.clock, now, self._parts.grace) - now)):
                return
            if changes := changed_within(run):
                if run.mesh.rank == 0:
                    line.send(
                        "note",
                        text=f"{changes}, so it is saved after a step alone; this one is still under way",
                    )
                return
            turn = 0
            while not self._over.is_set() and not self._saved(turn):
                turn += 1
                self._over.wait(AGAIN)

    def _saved(self, turn: int) -> bool:
        """Whether all ranks stood before the same update, and what they hold is saved. The gate stays shut then."""
        parts, gate = self._parts, self._parts.run.gate
        held = gate.acquire(blocking=False)
        try:
            step = str(parts.run.step) if held and parts.settled() else ""
            said = self._all(turn, step)
            if not step or set(said) != {step}:
                return False
            held = False
        finally:
            if held:
                gate.release()
        parts.line.drain()
        parts.line.drained(self._save(int(step)))
        return True

    def _save(self, step: int) -> str:
        """Save; returns what there is to be said."""
        try:
            folder = self._parts.save()
        except UnisonoError as error:
            return f"stopped as asked, within a step; {error.what}"
        if folder is None:
            return "stopped as asked, before the first step had ended"
        return f"stopped as asked, within a step; the run is saved as of step {step}"

    def _all(self, turn: int, step: str) -> list[str]:
        """What all ranks say in this turn; [] if this rank has ended meanwhile."""
        store, keys = self._parts.store, [f"drain/{turn}/{rank}" for rank in range(self._parts.world)]
        store.set(keys[self._parts.run.mesh.rank], step)
        while not store.check(keys):
            if self._over.wait(AGAIN / 2):
                return []
        return [store.get(key).decode() for key in keys]


def due(clock: Clock, now: float, grace: float) -> float:
    """When to give up the step under way, by the monotonic clock: as late as the save allows; at once where the pace of
    steps says that it will not end in time. now: when the grace began."""
    save = min(_MOST * grace, max(_SHARE * grace, 2 * clock.saving() + 1.0))
    latest = now + grace - save
    ends = clock.next_end()
    return now if ends is not None and ends > latest else latest
