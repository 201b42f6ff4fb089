"""All combinations of some values of each key."""

import itertools
import math
from pathlib import Path
from typing import ClassVar

from unisono_contrib.sweep.methods import SearchMethod
from unisono_contrib.sweep.progress import SweepProgress
from unisono_contrib.sweep.space import Params, cells


class GridSearch(SearchMethod):
    """Every combination of the listed values, each trained to the end."""

    name: ClassVar[str] = "grid"

    def misfit(self, progress: SweepProgress) -> str:
        for key, dimension in progress.space.items():
            if not dimension.cells():
                return f'a grid needs points of "{key}": {{low, high, points = 5}}, or a list'
        return ""

    def count(self, progress: SweepProgress) -> int:
        return math.prod(len(dimension.cells()) for dimension in progress.space.values())

    def propose(self, progress: SweepProgress, folder: Path) -> Params:
        return next(itertools.islice(cells(progress.space), len(progress.trials), None))
