"""Steps that overlap: schedules whose pipeline is not emptied between two, and policies that update part by part.

What plays such steps few need, so it lies in the sister package; here it is found.
"""

from collections.abc import Callable

from unisono.config import TrainConfig
from unisono.plan import Plan
from unisono.programs.schedules import SCHEDULES, Unflushed
from unisono.spec.errors import UsageError
from unisono.spec.finder import contributed
from unisono.sync import Sync
from unisono.train.step.gradients import Gradients
from unisono.train.step.run import Run

_AHEAD, _FLOW = "unisono.train.step.ahead", "unisono.train.step.flow"


def unflushed(plan: Plan) -> Unflushed | None:
    """The plan's schedule, where its pipeline is not emptied between steps."""
    schedule = SCHEDULES.read(plan.schedule)
    return schedule if isinstance(schedule, Unflushed) and plan.pp > 1 else None


def gradients_kind(plan: Plan, sync: Sync) -> type[Gradients]:
    """The class of a rank's gradients under this plan and policy."""
    if sync.overlaps:
        return contributed(_AHEAD).AheadGradients
    return Gradients if unflushed(plan) is None else contributed(_FLOW).FlowGradients


def flowing(run: Run, plan: Plan) -> Run:
    """The run itself; where its pipeline is not emptied, it plays on over the ends of steps and updates inside."""
    return run if unflushed(plan) is None else contributed(_FLOW).flowing(run, plan)


def run_ahead(run: Run, train: TrainConfig) -> str:
    """Let steps run ahead of their last gradients if the policy is meant for that. Returns what is to be said at the
    start, "" for nothing."""
    return contributed(_AHEAD).run_ahead(run, train) if run.sync.overlaps else ""


def drains(train: TrainConfig) -> Callable[[int], bool]:
    """After which updates something looks at the weights: an evaluation, a checkpoint, the end. Raises UsageError P24
    where nobody knows ahead."""
    if train.save_every == "auto":
        raise UsageError(
            "schedule=pipedream empties its pipeline before a checkpoint, and train.save_every = auto chooses late",
            where="plan.schedule, train.save_every",
            fix="train.save_every as a number of steps, or schedule=1f1b",
            code="P24",
        )
    every = [n for n in (train.eval_every, train.save_every) if isinstance(n, int) and n]
    return lambda step: step >= train.steps or any(step % n == 0 for n in every)
