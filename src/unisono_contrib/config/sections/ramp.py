"""`[ramp]`: a global batch that grows while a run trains."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pydantic import Field

from unisono.plan import Plan
from unisono.plan.checks import batch_of
from unisono.plan.grammar import named
from unisono.spec.errors import Problem
from unisono.spec.section import Section
from unisono.spec.training import Count


@dataclass(frozen=True, slots=True)
class BatchRamp:
    """Samples of each step. first, last: of the first steps, and of those after the ramp. growth: samples by which a
    batch is larger than the one of the stage before. steps: of the ramp, which its stages share evenly."""

    first: int
    last: int
    growth: int
    steps: int

    @property
    def stages(self) -> int:
        """Stages before the batch has its last size."""
        return (self.last - self.first) // self.growth

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

    first: Count = Field(
        default=1, description="samples of the first steps; train.global_batch is the last size"
    )
    growth: Count | None = Field(
        default=None, description="samples by which a batch grows each time; `first` when absent"
    )
    steps: Count | None = Field(
        default=None, description="steps over which it grows; a fifth of train.steps when absent"
    )

    @property
    def pins(self) -> tuple[str, ...]:
        return ("ramp",) if self.steps is not None else ("ramp", "train.steps")

    def sizes(self, train: Any) -> BatchRamp:
        """The batches of a resolved recipe's `[train]`."""
        return BatchRamp(
            self.first, train.global_batch, self.growth or self.first, self.steps or max(1, train.steps // 5)
        )

    def problems(self, recipe: Any, plan: Plan) -> Iterator[Problem]:
        yield from _plan_problems(recipe, plan)
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
