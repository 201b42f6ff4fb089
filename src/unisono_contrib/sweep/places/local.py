"""Trials as processes of this machine."""

import os
import select
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from unisono_contrib.sweep.places import TrialPlace
from unisono_contrib.sweep.room import Need
from unisono_contrib.sweep.trial import PieceOutcome, TrialJob, TrialProcess, ending, start


class LocalWorkers:
    """Trials under way on this machine, by number."""

    def __init__(self) -> None:
        self.processes = dict[int, TrialProcess]()

    def start(self, job: TrialJob, need: Need) -> None:
        self.processes[job.number] = start(job)

    def ended(self) -> Iterator[tuple[int, PieceOutcome]]:
        gone = {os.pidfd_open(trial.process.pid): number for number, trial in self.processes.items()}
        try:
            ready, _, _ = select.select([*gone], [], [])
        finally:
            for fd in gone:
                os.close(fd)
        for number in sorted(gone[fd] for fd in ready):
            outcome = self.processes[number].wait()
            del self.processes[number]
            if outcome is not None:
                yield number, outcome


class LocalPlace(TrialPlace):
    """Processes of this machine."""

    name: ClassVar[str] = "local"

    @contextmanager
    def open(self, grace: float) -> Iterator[LocalWorkers]:
        workers = LocalWorkers()
        with ending(workers.processes, grace):
            yield workers
