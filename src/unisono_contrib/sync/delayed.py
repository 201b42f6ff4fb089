"""Delayed gradients: sums over replicas travel while the next steps compute, and make their updates `lag` steps later.

The gradient of step k, of weights that have had the updates of steps 0 to k - 1 - lag, makes update k, in step k + lag,
at the learning rate of step k (Langford, Smola & Zinkevich, "Slow learners are fast", 2009, arXiv 0911.0491). The first
`lag` steps change no weight. The last step of a run also makes the updates of all gradients that are still on their
way, so that each step's gradient is applied once.

Fidelity: ROUNDING towards one device with the same policy. `lag=0` is `every_step`.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from unisono.plan.grammar import member, named
from unisono.spec.errors import Problem
from unisono.spec.fidelity import Fidelity
from unisono.spec.work import Call, Work
from unisono.sync import Policy, Sync

if TYPE_CHECKING:
    from unisono.codecs import Coder
    from unisono.comm.group import Group


class Delayed(Policy):
    """Every step, the sum of the gradients of the step `lag` steps before, which has travelled since."""

    name = "delayed"
    main: ClassVar[str] = "lag"
    fidelity = Fidelity.ROUNDING
    alone = True

    lag: int = Field(default=1, ge=0, le=64, description="steps from a gradient to its update")

    @property
    def update_lag(self) -> int:
        return self.lag

    def problems(self, plan: Any, batch: Any) -> Iterator[Problem]:
        if not self.lag:
            return
        said = f"sync={plan.sync} keeps the gradients of {self.lag} step{'s' * (self.lag > 1)} on their way"
        if plan.precision == "fp16":
            what = f"{said}, and precision=fp16 changes their scale meanwhile"
            yield Problem("P16", what, "plan.sync, plan.precision", "precision=bf16, or sync=every_step")
        schedule, codec = named("schedule", plan.schedule), member("codec", plan.codec)
        if plan.pp > 1 and schedule is not None and (not schedule.flushed or schedule.chains > 1):
            why = "holds the model twice" if schedule.flushed else "makes updates of its own within a step"
            what = f"{said}, and schedule={plan.schedule} {why}"
            yield Problem("P16", what, "plan.sync, plan.schedule", "schedule=1f1b")
        if codec is not None and not codec.elementwise:
            what = f"{said}, and codec={plan.codec} may need what it kept of one step before the next one is sent"
            yield Problem("P21", what, "plan.codec, plan.sync", "codec=plain or cast, or sync=every_step")

    def work(self, gradient_bytes: int, dp: int) -> Work:
        """Gradients of `lag` steps between two steps, and two counters."""
        nbytes = 2 * gradient_bytes * (dp - 1) // dp
        return Work((Call("dp", "all_reduce", nbytes),), self.lag * gradient_bytes + 16 * (self.lag > 0))

    def bind(self, slots: Sequence[Any], group: "Group", codec: "Coder") -> Sync:
        from unisono.sync.every_step import EveryStepSync
        from unisono_contrib.sync._delayed import DelayedSync

        return DelayedSync(slots, group, codec, self.lag) if self.lag else EveryStepSync(group, codec, slots)
