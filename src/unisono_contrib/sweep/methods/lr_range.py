"""The learning-rate range test (Smith, Cyclical learning rates for training neural networks, 2017)."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from unisono.observe.metrics import read_steps
from unisono.report.picture import ChartAxis, ChartLine, LineChart, line_chart
from unisono.spec.words import is_number, number
from unisono_contrib.sweep.methods import Conclusion, SearchMethod
from unisono_contrib.sweep.progress import SweepProgress
from unisono_contrib.sweep.space import Interval, Params

_SMOOTH = 0.9  # of the moving average of losses
_DIVERGED = 4.0  # times the least loss, from where on the run counts as diverged


@dataclass(frozen=True, slots=True)
class LrRange:
    """Learning rates of a range test. steepest: at which the loss fell fastest; least: at which it was the least; the
    largest useful rate lies between them. diverged: at which it had grown fourfold, None where it never did."""

    steepest: float
    least: float
    diverged: float | None


class LearningRateRange(SearchMethod):
    """One run whose learning rate grows from step to step: where the loss falls fastest, and where it diverges."""

    name: ClassVar[str] = "lr_range"

    def misfit(self, progress: SweepProgress) -> str:
        space = progress.space
        if (
            [*space] != ["train.lr"]
            or not isinstance(space["train.lr"], Interval)
            or space["train.lr"].low <= 0
        ):
            return 'a range test searches one interval above 0: "train.lr" = {low = 1e-6, high = 10.0}'
        return "" if progress.steps >= 10 else "a range test takes ten steps at least: train.steps = 200"

    def count(self, progress: SweepProgress) -> int:
        return 1

    def fixed(self, progress: SweepProgress) -> Params:
        low = progress.space["train.lr"].at(0.0)
        return {"train.lr_schedule": "range", "train.first_lr": low, "train.warmup_steps": 0}

    def propose(self, progress: SweepProgress, folder: Path) -> Params:
        return {"train.lr": progress.space["train.lr"].at(1.0)}

    def conclude(self, progress: SweepProgress) -> Conclusion:
        points = _points(progress)
        if (test := judge_range(points)) is None:
            return Conclusion(None, {})
        end = f"; diverged at {number(test.diverged)}" if test.diverged is not None else ""
        said = f"the loss fell fastest at {number(test.steepest)} and was least at {number(test.least)}{end}"
        return Conclusion({"train.lr": test.steepest}, {"lr_range": asdict(test)}, (said,))

    def charts(self, progress: SweepProgress) -> Sequence[LineChart | None]:
        points = _points(progress)
        finite = smoothed([(lr, loss) for lr, loss in points if math.isfinite(loss)])
        axis = ChartAxis("learning rate", whole=False, log=True)
        return [line_chart("Loss, smoothed, by learning rate", [ChartLine("", finite)], axis=axis)]


def _points(progress: SweepProgress) -> list[tuple[float, float]]:
    """(learning rate, loss) of each step of the one run."""
    if not progress.trials or not progress.trials[0].run_dir:
        return []
    steps, _ = read_steps(Path(progress.trials[0].run_dir) / "metrics.jsonl")
    known = [step for step in steps if is_number(step.get("lr")) and "loss" in step]
    return [(step["lr"], step["loss"] if is_number(step["loss"]) else math.inf) for step in known]


def smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Losses as moving averages without the bias of their beginning."""
    mean, out = 0.0, list[tuple[float, float]]()
    for at, (lr, loss) in enumerate(points, 1):
        mean = _SMOOTH * mean + (1 - _SMOOTH) * loss
        out.append((lr, mean / (1 - _SMOOTH**at)))
    return out


def judge_range(points: Sequence[tuple[float, float]]) -> LrRange | None:
    """What (learning rate, loss) of each step say; None for fewer than three steps with a loss."""
    curve = smoothed(points)
    least, diverged = math.inf, None
    for at, (lr, loss) in enumerate(curve):
        if not loss <= _DIVERGED * least and at:
            curve, diverged = curve[:at], lr
            break
        least = min(least, loss)
    if len(curve) < 3:
        return None
    lowest = min(range(len(curve)), key=lambda i: curve[i][1])
    inner = range(1, max(2, min(lowest + 1, len(curve) - 1)))

    def slope(i: int) -> float:
        (a, before), (b, after) = curve[i - 1], curve[i + 1]
        return (after - before) / math.log(b / a)

    return LrRange(curve[min(inner, key=slope)][0], curve[lowest][0], diverged)
