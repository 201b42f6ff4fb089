"""NumPy as a witness: one device, forward and backward by hand, and the update by its formula."""

from pathlib import Path
from typing import ClassVar

from unisono.config import Resolved
from unisono_contrib.verify.engines import StepEngine, beyond_engines


class NumpyWitness(StepEngine):
    """One device without a framework."""

    name: ClassVar[str] = "numpy"

    def problem(self, resolved: Resolved) -> str:
        return beyond_engines(resolved)

    def play(self, question: Path, resolved: Resolved, out: Path) -> None:
        from unisono_contrib.verify.engines.numpy.play import play

        play(question, out)
