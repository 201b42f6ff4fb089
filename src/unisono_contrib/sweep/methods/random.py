"""Random search (Bergstra and Bengio, 2012)."""

from pathlib import Path
from typing import ClassVar

from unisono_contrib.sweep.methods import SearchMethod
from unisono_contrib.sweep.progress import SweepProgress
from unisono_contrib.sweep.space import Params, drawn


class RandomSearch(SearchMethod):
    """Values drawn at random, each trial trained to the end."""

    name: ClassVar[str] = "random"

    def propose(self, progress: SweepProgress, folder: Path) -> Params:
        return drawn(progress.space, progress.seed, len(progress.trials))
