"""The gain of AdaScale (Johnson et al., 2020), and the learning rate that follows it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from unisono.sync import Verdict
from unisono.train.step.numbers import Numbers
from unisono.train.step.run import Run
from unisono_contrib.train.step.noise_scale import NoiseScale

GRID = 1024
"""Gains are multiples of 1/1024, far finer than their noise: what is rounded otherwise in the gradients of another plan
changes neither a learning rate nor the place in the schedule."""


def gain(variance: float, signal: float, ratio: float) -> float:
    """(σ² + μ²) / (σ²/S + μ²), from 1 to S. variance: σ², of a small batch's gradient. signal: μ², the squared norm of
    the true gradient. ratio: S, large batch over small. An estimate below 0 counts as 0; 1 where both are."""
    variance, signal = max(0.0, variance), max(0.0, signal)
    if variance + signal == 0.0:
        return 1.0
    exact = (variance + signal) / (variance / ratio + signal)
    return min(ratio, max(1.0, round(exact * GRID) / GRID))


class ScaledRate:
    """The learning rate of a run whose steps are worth several of a smaller batch of `batch` samples.

    base(step): the rate of that batch, over `steps` steps. `progress`: such steps that were made; checkpoints keep it.
    """

    def __init__(self, scale: NoiseScale, batch: int, steps: int, base: Callable[[int], float]) -> None:
        self.scale, self.batch, self.steps, self.base = scale, batch, steps, base
        self.progress = torch.zeros((), dtype=torch.float64)
        self.gain = 1.0

    def attach(self, run: Run) -> Run:
        """The run with this rate. Called when its ranks have met, each time. Raises UsageError P44 as
        `NoiseScale.attach`."""
        self.run = self.scale.attach(run)
        run.update = replace(
            run.update,
            rate=self,
            observe=self.observe,
            keeps={**run.update.keeps, "progress": self.progress},
            after=(*run.update.after, self.tell),
        )
        return run

    def __call__(self, step: int) -> float:
        """The rate of the step under way, whose number in the run says nothing here."""
        return self.gain * self.base(min(int(self.progress), self.steps - 1))

    def observe(self, numbers: Numbers) -> None:
        """The gain of a step whose update is made, from means which it is part of."""
        self.scale.observe(numbers)
        noise, signal = float(self.scale.noise), float(self.scale.signal)
        ratio = self.run.of_leaves * self.run.replica.micro_batch / self.batch
        self.gain = gain(noise / self.batch, signal, ratio)

    def tell(self, verdict: Verdict) -> Mapping[str, Any]:
        """After the update: the schedule goes on by the gain."""
        if verdict is Verdict.APPLY:
            self.progress.add_(self.gain)
        return {"adascale_gain": self.gain, "adascale_steps": float(self.progress)}
