"""The largest useful batch (McCandlish et al., An empirical model of large-batch training, 2018).

Each batch is trained for as many steps. How many of them it takes to come to the last loss of the smallest batch says
what it is worth: twice the batch takes half the steps at best, and as many steps where it is worth nothing.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from unisono.report.collect import collect
from unisono_contrib.report.compare import ComparedRun, target_of
from unisono_contrib.sweep.methods import Conclusion, SearchMethod
from unisono_contrib.sweep.progress import SweepProgress
from unisono_contrib.sweep.space import Params

_KEY = "train.global_batch"


class LargestBatch(SearchMethod):
    """One run of each batch: the steps that each takes to one loss, and the largest batch that is still worth it."""

    name: ClassVar[str] = "batch"

    gain: float = Field(
        default=1.5,
        gt=1.0,
        le=2.0,
        description="times fewer steps that twice the batch must take to be useful",
    )
    scale: Literal["sqrt", "linear", "none"] = Field(
        default="sqrt", description="how the learning rate grows with the batch: sqrt | linear | none"
    )

    def misfit(self, progress: SweepProgress) -> str:
        batches = self._batches(progress)
        if (
            [*progress.space] != [_KEY]
            or len(batches) < 2
            or not all(isinstance(b, int) and b > 0 for b in batches)
        ):
            return f'this method searches batches alone: "{_KEY}" = [16, 32, 64, 128]'
        return ""

    def _batches(self, progress: SweepProgress) -> list[int]:
        return sorted(map(int, progress.space[_KEY].cells())) if _KEY in progress.space else []

    def count(self, progress: SweepProgress) -> int:
        return len(self._batches(progress))

    def propose(self, progress: SweepProgress, folder: Path) -> Params:
        batches = self._batches(progress)
        batch = batches[len(progress.trials)]
        power = {"sqrt": 0.5, "linear": 1.0, "none": 0.0}[self.scale]
        return {_KEY: batch, "train.lr": progress.lr * (batch / progress.batch) ** power}

    def conclude(self, progress: SweepProgress) -> Conclusion:
        runs = {t.params[_KEY]: ComparedRun("", collect(t.run_dir)) for t in progress.trials if t.run_dir}
        runs = {batch: run for batch, run in sorted(runs.items()) if run.progress}
        target = target_of(next(iter(runs.values()))) if runs else None
        if target is None:
            return Conclusion(None, {})
        reached = {batch: run.reaches(target) for batch, run in runs.items()}
        steps = {batch: at.step for batch, at in reached.items() if at is not None}
        useful = largest_useful(list(steps.items()), self.gain)
        rows = [
            {"global_batch": b, "steps": steps.get(b), "samples": b * steps[b] if b in steps else None}
            for b in runs
        ]
        params = next((t.params for t in progress.trials if t.params[_KEY] == useful), None)
        said = [
            f"batch {row['global_batch']}: {row['steps'] or 'never'} steps to loss {target.loss:.4g}"
            for row in rows
        ]
        facts = {"target_loss": target.loss, "batches": rows, "largest_useful_batch": useful}
        return Conclusion(params, facts, (*said, f"largest useful batch: {useful}"))


def largest_useful(steps: Sequence[tuple[int, int]], gain: float) -> int:
    """Of (batch, steps to one loss), the largest batch up to which each doubling takes `gain` times fewer steps.

    largest_useful([(16, 100), (32, 55), (64, 50)], 1.5) is 32.
    """
    useful, before = steps[0]
    for batch, taken in steps[1:]:
        if before / taken < gain ** math.log2(batch / useful):
            break
        useful, before = batch, taken
    return useful
