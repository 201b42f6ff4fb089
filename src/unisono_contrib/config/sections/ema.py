"""`[ema]`: an exponential moving average of the weights, kept beside them."""

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import Field

from unisono.plan.grammar import named
from unisono.spec.errors import Problem
from unisono.spec.section import Section


class EmaConfig(Section):
    """Average the weights over the updates (Polyak and Juditsky, 1992; with a decay: Tarvainen and Valpola, 2017). The
    average is part of checkpoints, and is evaluated and exported with `--weights ema`."""

    name: ClassVar[str] = "ema"
    one_run: ClassVar[bool] = True

    decay: float = Field(
        default=0.999,
        ge=0.0,
        lt=1.0,
        description="share of the average that an update leaves; its memory is about 1 / (1 - decay) updates",
    )
    warmup: bool = Field(
        default=False,
        description="the decay of update n, from 1 on, is at most (1 + n) / (10 + n), so that early weights fade soon",
    )
    validates: bool = Field(
        default=False,
        description="whether validations of the run use the average in the place of the weights",
    )

    @property
    def kept(self) -> int:
        return 1

    def decay_at(self, update: int) -> float:
        """The decay of an update by its number; the first is 1."""
        return min(self.decay, (1 + update) / (10 + update)) if self.warmup else self.decay

    def average_step(self, update: int) -> float:
        return 1.0 - self.decay_at(update)

    def problems(self, recipe: Any, plan: Any) -> Iterator[Problem]:
        policy, schedule = named("sync", plan.sync), named("schedule", plan.schedule)
        if policy is not None and (not policy.equal or policy.update_lag):
            why = "updates come late" if policy.equal else "replicas have weights of their own"
            what = f"under sync={plan.sync} {why}, and an average of the run's weights has none to follow"
            yield Problem("P45", what, "plan.sync, ema", "sync=every_step, or leave [ema] out")
        if plan.pp > 1 and schedule is not None and not schedule.flushed:
            what = f"schedule={plan.schedule} updates each stage at a time of its own"
            yield Problem("P45", what, "plan.schedule, ema", "schedule=1f1b, or leave [ema] out")
