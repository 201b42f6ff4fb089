"""A batch whose size the run decides, by the gradient noise scale that it measures.

A batch far below the noise scale wastes steps, one far above it wastes samples (McCandlish et al., 2018). So the batch
grows to the noise scale, and never shrinks. What decides are
numbers that all ranks have alike, after a step whose update was made. The next step has the new size.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unisono.sync import Verdict
from unisono.train.step.run import Run
from unisono_contrib.config.sections.ramp import BatchSizes
from unisono_contrib.train.data.ramped import StepSizes
from unisono_contrib.train.step.noise_scale import NoiseScale

SIZE, SINCE, BEGIN = "ramp_size", "ramp_since", "ramp_begin"


class KnownSizes:
    """The sizes of a run's steps as far as it has decided them. size: samples of each step from step `since` on, before
    which there were `begin` samples. Three numbers, float64 [], that checkpoints keep."""

    def __init__(self, size: Tensor, since: Tensor, begin: Tensor) -> None:
        self.size, self.since, self.begin = size, since, begin

    @classmethod
    def first(cls, size: int) -> "KnownSizes":
        """Those of a run at its beginning."""
        since, begin = torch.zeros(2, dtype=torch.float64).unbind()
        return cls(torch.tensor(float(size), dtype=torch.float64), since, begin)

    @classmethod
    def among(cls, kept: Mapping[str, Tensor], first: int) -> "KnownSizes":
        """Those of the run that keeps these numbers, also when they change; of a beginning where it keeps none."""
        return cls(kept[SIZE], kept[SINCE], kept[BEGIN]) if SIZE in kept else cls.first(first)

    @property
    def kept(self) -> dict[str, Tensor]:
        """The numbers by name."""
        return {SIZE: self.size, SINCE: self.since, BEGIN: self.begin}

    def samples(self, step: int) -> int:
        """Samples of a step. Raises ValueError for one before the last growth, whose size is no longer known."""
        if step < int(self.since):
            raise ValueError(f"step {step} lies before step {int(self.since)}, from which on sizes are known")
        return int(self.size)

    def before(self, step: int) -> int:
        """Samples of all steps before this one, together. Raises ValueError as `samples`."""
        return int(self.begin) + (step - int(self.since)) * self.samples(step)

    def grow(self, step: int, size: int) -> None:
        """Steps from this one on have this size."""
        begin = self.before(step)
        for kept, number in ((self.begin, begin), (self.since, step), (self.size, size)):
            kept.fill_(float(number))


class NoiseRamp:
    """Looks at the noise scale each `every` steps, and lets the batch grow to it. `attach` has a live run do so."""

    def __init__(self, scale: NoiseScale, sizes: BatchSizes, every: int) -> None:
        self.scale, self.sizes, self.every = scale, sizes, every
        self.known = KnownSizes.first(sizes.first)
        self._run: Run | None = None

    def attach(self, run: Run) -> Run:
        """The run, whose batch grows from now on. Called when its ranks have met, each time. Raises UsageError P44 as
        `NoiseScale.attach`."""
        self._run = run = self.scale.attach(run)
        keeps = {**run.update.keeps, **self.known.kept}
        run.update = replace(run.update, keeps=keeps, after=(*run.update.after, self.look))
        return run

    def look(self, verdict: Verdict) -> Mapping[str, Any]:
        """After an update: the size of the steps that follow. Raises RuntimeError where the step had another size than
        the run has decided, which its batches then do not follow."""
        run = self._run
        if run is None or verdict is not Verdict.APPLY:
            return {}
        had, size = run.of_leaves * run.replica.micro_batch, self.known.samples(run.step)
        if had != size:
            raise RuntimeError(f"a step of {had} samples where the run has decided on {size}")
        following = run.step + 1
        if following % self.every == 0 and (grown := self.sizes.after(size, self.scale.value)) > size:
            self.known.grow(following, grown)
        return {}


def scale_rate(run: Run, sizes: StepSizes, factor: Callable[[int], float]) -> Run:
    """The run with a learning rate for each step's own batch. factor(samples): what the rate is multiplied by."""
    rate = run.update.rate
    run.update = replace(run.update, rate=lambda step: rate(step) * factor(sizes.samples(step)))
    return run


def count_samples(run: Run, sizes: StepSizes, steps: int) -> Run:
    """The run with a schedule that is as far at each step as its samples are: a step before which a tenth of all
    samples were read has the rate of one before which a tenth of the `steps` were made."""
    rate, total = run.update.rate, sizes.before(steps)
    run.update = replace(run.update, rate=lambda step: rate(sizes.before(step) * steps // total))
    return run
