"""`[ramp]`: a global batch that grows while a run trains."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from unisono.plan import Plan
from unisono.plan.checks import batch_of
from unisono.plan.grammar import named
from unisono.spec.errors import Problem
from unisono.spec.section import Section
from unisono.spec.training import Count
from unisono_contrib.config.sections.noise_scale import NoiseScaleConfig, computed_otherwise, unmeasurable

GRID = 1024
"""A noise scale is rounded to 1/1024 of a sample before it is compared with a batch."""


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The sizes that a batch may have, in samples: first, first + growth, first + 2 * growth ... last."""

    first: int
    last: int
    growth: int

    @property
    def stages(self) -> int:
        """Sizes below the last one."""
        return (self.last - self.first) // self.growth

    def at_most(self, samples: float) -> int:
        """The largest size of at most so many samples; the first one where all are larger."""
        stage = math.floor((samples - self.first) / self.growth)
        return self.first + self.growth * min(self.stages, max(0, stage))

    def after(self, size: int, noise_scale: float | None) -> int:
        """The size that follows `size`: the largest that is not above the noise scale in samples; never a smaller one,
        and at most twice as large, or one stage more. None: noise hides the signal, so that the scale is far above."""
        most = max(self.at_most(2 * size), min(self.last, size + self.growth))
        if noise_scale is None or math.isinf(noise_scale):
            return most
        # Rounded: two plans whose estimates differ by rounding alone do not differ at a size itself.
        return min(most, max(size, self.at_most(round(noise_scale * GRID) / GRID)))


@dataclass(frozen=True, slots=True)
class BatchRamp(BatchSizes):
    """Samples of each step, known from the beginning. steps: of the ramp, which its sizes share evenly."""

    steps: int

    def samples(self, step: int) -> int:
        """Samples of a step, from 0."""
        return min(self.last, self.first + self.growth * (step * self.stages // self.steps))

    def before(self, step: int) -> int:
        """Samples of all steps before this one, together."""
        begins = [-(-stage * self.steps // self.stages) for stage in range(self.stages + 1)]
        ends = [*begins[1:], max(step, begins[-1])]
        sizes = (self.first + self.growth * stage for stage in range(self.stages + 1))
        return sum(
            size * (min(step, end) - min(step, begin))
            for size, begin, end in zip(sizes, begins, ends, strict=True)
        )


class RampConfig(Section):
    """The global batch grows by more micro-batches in a step (Smith et al., "Don't decay the learning rate, increase
    the batch size", 2018). The order of samples stays that of a run without a ramp."""

    name: ClassVar[str] = "ramp"

    by: Literal["steps", "noise_scale"] = Field(
        default="steps",
        description="what a batch grows with: steps, or the gradient noise scale that the run measures",
    )
    first: Count = Field(
        default=1, description="samples of the first steps; train.global_batch is the last size"
    )
    growth: Count | None = Field(
        default=None, description="samples by which a batch grows each time; `first` when absent"
    )
    steps: Count | None = Field(
        default=None, description="by steps: over which it grows; a fifth of train.steps when absent"
    )
    every: Count | None = Field(
        default=None, description="by noise_scale: steps between two looks at it; 20 when absent"
    )
    scale_lr: bool = Field(
        default=False, description="scale each step's lr to its own batch, by the rule train.lr_scaling"
    )

    schedule: Literal["steps", "samples"] = Field(
        default="steps", description="by steps: what the schedule of the learning rate counts"
    )

    @property
    def measured(self) -> bool:
        """Whether the run decides the sizes by what it measures."""
        return self.by == "noise_scale"

    @property
    def pins(self) -> tuple[str, ...]:
        if self.measured:
            return ("ramp", "noise_scale")
        return ("ramp",) if self.steps is not None else ("ramp", "train.steps")

    def sizes(self, train: Any) -> BatchSizes:
        """The sizes under a resolved recipe's `[train]`."""
        return BatchSizes(self.first, train.global_batch, self.growth or self.first)

    def ramp(self, train: Any) -> BatchRamp:
        """The batches by steps under a resolved recipe's `[train]`."""
        sizes = self.sizes(train)
        return BatchRamp(sizes.first, sizes.last, sizes.growth, self.steps or max(1, train.steps // 5))

    def problems(self, recipe: Any, plan: Plan) -> Iterator[Problem]:
        yield from _plan_problems(recipe, plan)
        yield from self._key_problems(recipe, plan)
        batch = batch_of(plan, recipe.train)[0] if plan.dp != -1 else None
        if batch is None:
            return
        growth, unit = self.growth or self.first, batch.micro_batch * batch.replicas
        whole = "train.micro_batch" if recipe.train.micro_batch else "plan.micros, train.micro_batch"
        if batch.global_batch <= self.first or (batch.global_batch - self.first) % growth:
            what = f"a batch of {self.first} that grows by {growth} never has train.global_batch = {batch.global_batch}"
            yield Problem(
                "C06", what, "ramp.first, ramp.growth, train.global_batch",
                "a global_batch of first + n * growth; a ramp that shrinks is none",
            )  # fmt: skip
        elif self.first % unit or growth % unit:
            what = (
                f"batches of {self.first}, and by {growth} more, are no multiples of micro_batch {batch.micro_batch}"
                f" x replicas {batch.replicas} = {unit}"
            )
            yield Problem("C06", what, f"ramp, {whole}", "a smaller train.micro_batch, or fewer replicas")
        else:
            plain = recipe.model_copy(update={"ramp": None})
            usual = plan.check(plain)
            for size in range(self.first, batch.global_batch, growth):
                sizes = {"global_batch": size, "micro_batch": batch.micro_batch}
                smaller = plain.model_copy(update={"train": recipe.train.model_copy(update=sizes)})
                of_size = replace(plan, micros=size // unit).check(smaller)
                yield from (problem for problem in of_size if problem not in usual)

    def _key_problems(self, recipe: Any, plan: Plan) -> Iterator[Problem]:
        """Keys of the recipe that contradict each other, and what cannot be measured."""
        other = {"ramp.steps": self.steps} if self.measured else {"ramp.every": self.every}
        for key in (key for key, value in other.items() if value is not None):
            yield Problem(
                "C06", f"{key} says nothing where ramp.by is {self.by}", f"{key}, ramp.by", "leave it out"
            )
        if self.scale_lr and recipe.train.lr_scaling == "none":
            what = "ramp.scale_lr scales lr by the rule train.lr_scaling, which is none"
            yield Problem(
                "C06",
                what,
                "ramp.scale_lr, train.lr_scaling",
                "--train.lr_scaling sqrt, with train.lr_base_batch",
            )
        if not self.measured:
            return
        if self.schedule == "samples":
            what = "ramp.schedule = samples wants the samples of all steps, which by = noise_scale does not know before"
            yield Problem("C06", what, "ramp.schedule, ramp.by", "--ramp.schedule steps, or --ramp.by steps")
        yield from unmeasurable(plan, "ramp.by")
        yield from computed_otherwise(recipe, "ramp.by")
        if recipe.train.optimiser().paced:
            what = f"optimizer={recipe.train.optimizer} measures noise for a batch whose size is fixed"
            yield Problem("C06", what, "train.optimizer, ramp.by", "--ramp.by steps, or another optimizer")
        if recipe.train.micro_batch and self.first < 2 * recipe.train.micro_batch:
            what = f"a first step of {self.first} samples is one micro-batch, to be compared with no other"
            yield Problem(
                "C06", what, "ramp.first, train.micro_batch", f"--ramp.first {2 * recipe.train.micro_batch}"
            )


def smoothing_of(recipe: Any) -> float:
    """The decay of the means by which a ramp is decided: that of `[noise_scale]`, where the recipe has it."""
    section = recipe.noise_scale
    return (section if isinstance(section, NoiseScaleConfig) else NoiseScaleConfig()).smoothing


def _plan_problems(recipe: Any, plan: Plan) -> Iterator[Problem]:
    """Plans and sections under which the leaves of a step cannot change."""
    policy, schedule = named("sync", plan.sync), named("schedule", plan.schedule)
    if policy is not None and not policy.resizes:
        what = f"sync={plan.sync} counts on batches of one size"
        yield Problem("P43", what, "plan.sync, ramp", "sync=every_step or canonical, without balance")
    if schedule is not None and not schedule.flushed:
        what = f"schedule={plan.schedule} plays micro-batches of several steps at once, and counts on as many in each"
        yield Problem("P43", what, "plan.schedule, ramp", "schedule=1f1b")
    if recipe.privacy is not None:
        what = "[privacy] draws batches of random size, whose mean is train.global_batch"
        yield Problem("P43", what, "privacy, ramp", "one of these sections")
