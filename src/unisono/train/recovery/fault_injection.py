"""Where a run under faults plays them: the moments of a rank that a script of faults may name.

Under no script nothing is done there. What plays a script (`--chaos`) lies in the sister package.
"""

from collections.abc import Sequence
from pathlib import Path

from unisono.observe.span import Recorder
from unisono.parallel.player import Leaf
from unisono.spec.finder import contributed
from unisono.train.step.run import Run


class FaultInjector:
    """What a rank does beside training while faults are played. This one: nothing."""

    def recorder(self, rank: int) -> Recorder:
        """The rank's recorder, whose spans are the phases of its steps."""
        return Recorder(rank)

    def trains(self, run: Run, epoch: int) -> None:
        """The rank has its state and begins to train in an epoch of members."""

    def fetched(self, leaves: Sequence[Leaf]) -> None:
        """The rank has the micro-batches of its next step."""

    def reached(self, phase: str, epoch: int = 0) -> None:
        """The rank is at this moment, which no span of its recorder tells. epoch: of the meeting that it goes to."""

    def pauses(self) -> None:
        """The rank trains no more in this epoch."""


def injector_of(script: str, run_dir: Path, rank: int) -> FaultInjector:
    """What the order of a run says of faults: a script's text, "" for none. Call it before the rank meets others."""
    if not script:
        return FaultInjector()
    return contributed("unisono.train.recovery.scripted_faults").of_script(script, run_dir, rank)
