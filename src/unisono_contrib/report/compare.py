"""Several runs beside each other: how their losses fell, what that cost, and the first step in which their bits differ.

The first run is the *baseline*: how soon the others come to its last loss is what they are compared by. Runs of equal
global batch are compared step by step, others by the samples that they have seen.
"""

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from unisono.observe.span import PARTS
from unisono.report.analyse import peak_memory
from unisono.report.collect import Record, RunRecord, collect
from unisono.report.verdict.evidence import STACKED
from unisono.spec.errors import UsageError
from unisono.spec.runs import run_folder
from unisono.spec.words import is_number

EXACT = ("loss", "grad_norm")
"""What of a step is compared bit by bit: metrics.jsonl has each in as many digits as tell it from all others."""
_PARTS, _MOST = 20, 50
"""A last loss is the mean over the last one in so many of the baseline's steps, but over so many steps at most."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands after a step. seconds, tokens, nbytes: since the first step that is written down; nbytes are
    those that rank 0 sent. loss: None where it is no number."""

    step: int
    loss: float | None
    tokens: float
    seconds: float
    nbytes: float


@dataclass(frozen=True)
class TargetLoss:
    """A loss to come to: the mean of the baseline's last `window` losses, which others have to reach in such a mean."""

    loss: float
    window: int


@dataclass(frozen=True)
class ComparedRun:
    """A run among others. name: of its folder, as far as it tells it from the other ones."""

    name: str
    record: RunRecord

    @cached_property
    def progress(self) -> tuple[Progress, ...]:
        """Where it stood after each step that is written down."""
        tokens, seconds, nbytes = 0, 0.0, 0
        steps = []
        for record in self.record.steps:
            if "loss" not in record:
                continue
            tokens += _number(record, "tokens")
            seconds += seconds_of(record)
            nbytes += _number(record, "bytes_sent")
            loss = record["loss"] if is_number(record["loss"]) else None
            steps.append(Progress(record["step"], loss, tokens, seconds, nbytes))
        return tuple(steps)

    @property
    def batch(self) -> int | None:
        """Samples of a step; None where its recipe cannot be read."""
        return _train_key(self.record, "global_batch")

    @property
    def behind(self) -> str:
        """`step 31 of 100`, of a run that has not made all its steps; else ""."""
        steps = _train_key(self.record, "steps")
        last = self.progress[-1].step
        return f"step {last} of {steps}" if steps is not None and last < steps else ""

    def means(self, window: int) -> list[tuple[float, Progress]]:
        """The mean of each `window` losses in a row, with the progress until the last of them."""
        steps = [at for at in self.progress if at.loss is not None and math.isfinite(at.loss)]
        sums = [0.0, *itertools.accumulate(at.loss or 0.0 for at in steps)]
        return [((sums[i] - sums[i - window]) / window, steps[i - 1]) for i in range(window, len(sums))]

    def reaches(self, target: TargetLoss) -> Progress | None:
        """Where it stood when it first came to the target loss; None where it never does."""
        return next((at for mean, at in self.means(target.window) if mean <= target.loss), None)


@dataclass(frozen=True, slots=True)
class StepMap:
    """Steps of a run by those of another, at equal samples. batch, other: samples of a step of both.

    StepMap(32, 64)(4) is 2; StepMap(32, 64)(3) is None.
    """

    batch: int
    other: int

    def __call__(self, step: int) -> int | None:
        samples = step * self.batch
        return None if samples % self.other else samples // self.other


CompareStates = Callable[[Path, Path, StepMap], Mapping[str, Any]]
"""Compares the checkpoints of two run folders: see `compare_runs` of train.state.checkpoint.differ."""


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first step in which two runs differ. key: `loss` or `grad_norm`. baseline, run: its two values."""

    step: int
    run_step: int
    samples: int | None
    key: str
    baseline: float | None
    run: float | None


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far a run has the bits of the baseline. steps: that both have. first: None where all of these are equal."""

    steps: int
    first: FirstDifference | None


@dataclass(frozen=True)
class Comparison:
    """Runs beside each other; the first is the baseline. target: None where it has no loss that is a number."""

    runs: Sequence[ComparedRun]
    target: TargetLoss | None

    @property
    def baseline(self) -> ComparedRun:
        return self.runs[0]

    @property
    def by_samples(self) -> bool:
        """Whether the runs' global batches differ, so that equal steps are no equal work."""
        return len({run.batch for run in self.runs}) > 1 and None not in {run.batch for run in self.runs}


def gather(paths: Sequence[str | Path]) -> Comparison:
    """Read the runs. Raises UsageError: C04 for fewer than two different ones, C03 for one that is none or is empty."""
    folders = [run_folder(path) for path in paths]
    whole = [folder.resolve() for folder in folders]
    twice = next((paths[i] for i, folder in enumerate(whole) if folder in whole[:i]), None)
    if len(paths) < 2 or twice is not None:
        what = (
            "one run alone cannot be compared"
            if len(paths) < 2
            else f"{twice} is the same run as one before it"
        )
        raise UsageError(what, where="unisono compare", fix="unisono compare RUN RUN", code="C04")
    runs = [ComparedRun(name, collect(folder)) for name, folder in zip(names_of(whole), folders, strict=True)]
    for run in runs:
        if not run.progress:
            raise UsageError(
                f"{run.record.folder} has no step to compare", where=str(run.record.folder / "metrics.jsonl"),
                likely="; ".join(line for line in run.record.missing if line.startswith("metrics"))
                or "it has made none yet",
                fix="compare it when it has made a step", code="C03",
            )  # fmt: skip
    return Comparison(runs, target_of(runs[0]))


def names_of(folders: Sequence[Path]) -> list[str]:
    """What tells folders from each other: `a` of `runs/a/1`, beside `b` of `runs/b/1`."""
    common = os.path.commonpath(folders)
    parts = [folder.relative_to(common).parts for folder in folders]
    enough = next(k for k in itertools.count(1) if len({part[:k] for part in parts}) == len(parts))
    return ["/".join(part[:enough]) for part in parts]


def target_of(baseline: ComparedRun) -> TargetLoss | None:
    """The last loss of a run, over so many steps that it is no chance; None where no loss is a number."""
    window = max(1, min(_MOST, len(baseline.progress) // _PARTS))
    means = baseline.means(window) or baseline.means(window := 1)
    return TargetLoss(means[-1][0], window) if means else None


def seconds_of(record: Record) -> float:
    """Wall seconds of a step, from its parts, or else from its speed."""
    time = record.get("time")
    if isinstance(time, dict) and any(is_number(time.get(part)) for part in PARTS):
        return sum(time[part] for part in STACKED if is_number(time.get(part)))
    speed = _number(record, "tokens_per_s")
    return _number(record, "tokens") / speed if speed else 0.0


def agreement(baseline: ComparedRun, run: ComparedRun, by_samples: bool = False) -> Agreement:
    """Whether a run has the losses and gradient norms of the baseline, to the last bit.

    by_samples: compare the steps after which both have seen as many samples, instead of those of the same number.
    """
    at = aligned(baseline, run, by_samples)
    theirs = {record["step"]: record for record in run.record.steps if "loss" in record}
    steps, first = 0, None
    for record in baseline.record.steps:
        other = theirs.get(at(record["step"]) or -1)
        if other is None or "loss" not in record:
            continue
        steps += 1
        differ = next((key for key in EXACT if _bits(record.get(key)) != _bits(other.get(key))), None)
        if differ and first is None:
            samples = record["step"] * baseline.batch if by_samples and baseline.batch else None
            values = record.get(differ), other.get(differ)
            first = FirstDifference(record["step"], other["step"], samples, differ, *values)
    return Agreement(steps, first)


def aligned(baseline: ComparedRun, run: ComparedRun, by_samples: bool) -> StepMap:
    """Which step of `run` stands beside a step of the baseline."""
    return StepMap(baseline.batch or 1, run.batch or 1) if by_samples else StepMap(1, 1)


def differing_keys(runs: Sequence[ComparedRun]) -> dict[str, list[Any]]:
    """Keys of the resolved recipes in which the runs differ, and the value of each run; None where it has none."""
    tables = [dict(_flat(run.record.config)) for run in runs if run.record.config]
    if len(tables) < len(runs):  # one cannot be read: nothing is known of its keys
        return {}
    keys = dict.fromkeys(key for table in tables for key in table)
    values = {key: [table.get(key) for table in tables] for key in keys}
    return {key: row for key, row in values.items() if any(value != row[0] for value in row)}


def facts(comparison: Comparison, states: CompareStates) -> dict[str, Any]:
    """The object of `compare --json`. states: compares the checkpoints of two run folders."""
    target = comparison.target
    return {
        "baseline": comparison.baseline.name,
        "compared_by": "samples" if comparison.by_samples else "steps",
        "target_loss": None if target is None else target.loss,
        "target_window": None if target is None else target.window,
        "runs": [figures(run, target) for run in comparison.runs],
        "differences": [
            {"key": key, "values": values} for key, values in differing_keys(comparison.runs).items()
        ],
        "bits": [bits_of(comparison, run, states) for run in comparison.runs[1:]],
    }


def bits_of(comparison: Comparison, run: ComparedRun, states: CompareStates) -> dict[str, Any]:
    """Whether a run has the bits of the baseline, and where it leaves them first."""
    baseline, by_samples = comparison.baseline, comparison.by_samples
    agreed = agreement(baseline, run, by_samples)
    checkpoints = states(baseline.record.folder, run.record.folder, aligned(baseline, run, by_samples))
    is_same = agreed.first is None and checkpoints["first"] is None
    return {
        "run": run.name,
        "steps_compared": agreed.steps,
        "bit_identical": is_same if agreed.steps or checkpoints["compared"] else None,
        "first_divergence": None if agreed.first is None else asdict(agreed.first),
        "checkpoints": checkpoints,
    }


def figures(run: ComparedRun, target: TargetLoss | None) -> dict[str, Any]:
    """A run's row of the table."""
    record, last = run.record, run.progress[-1]
    reached = None if target is None else run.reaches(target)
    return {
        "name": run.name,
        "run_dir": str(record.folder),
        "plan": record.plan,
        "first_step": run.progress[0].step,
        "steps": last.step,
        "samples": None if run.batch is None else last.step * run.batch,
        "loss": last.loss,
        "val_loss": record.validation[-1][1] if record.validation else None,
        "tokens_per_s": record.speed,
        "unit": record.unit,
        "tokens": last.tokens,
        "seconds": last.seconds,
        "bytes_sent": last.nbytes,
        "steps_to_target": None if reached is None else reached.step,
        "seconds_to_target": None if reached is None else reached.seconds,
        "bytes_to_target": None if reached is None else reached.nbytes,
        "peak_mem_mib": max((size for _, size in peak_memory(record)), default=None),
        "behind": run.behind,
        "missing": [line for line in record.missing if line.startswith(("metrics", "config"))],
    }


def _bits(value: object) -> object:
    """What is equal for equal bits alone: zeros have signs."""
    return value.hex() if isinstance(value, float) else value


def _train_key(record: RunRecord, key: str) -> int | None:
    train = record.config.get("train")
    value = train.get(key) if isinstance(train, dict) else None
    return value if isinstance(value, int) and value > 0 else None


def _number(record: Record, key: str) -> float:
    value = record.get(key, 0)
    return value if is_number(value) else 0


def _flat(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """(dotted key, value) of all values of a TOML text."""
    flat: list[tuple[str, Any]] = []
    for key, value in table.items():
        flat += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return flat
