"""`[privacy]`: how much a run may reveal of any one sample (`unisono train`) or client (`unisono federate`)."""

import math
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from unisono.plan import Plan
from unisono.plan.grammar import named
from unisono.plan.grid import Grid
from unisono.spec.errors import Problem
from unisono.spec.fidelity import Fidelity
from unisono.spec.section import Section
from unisono.spec.training import LOSSES, NotNegative, Positive


class PrivacyConfig(Section):
    """Differential privacy: what each sample, or in federated rounds each client, adds to an update is clipped, and
    noise hides it."""

    name: ClassVar[str] = "privacy"
    by_sample: ClassVar[bool] = True

    noise: NotNegative | None = Field(
        default=None, description="standard deviation of the noise over `clip`; or say target_epsilon"
    )
    clip: Annotated[float, Field(gt=0.0)] = Field(
        default=1.0,
        description="greatest norm of the gradient of a sample, or of the delta of a client; inf: any",
    )
    delta: Annotated[float, Field(ge=1e-12, lt=1.0)] = Field(
        default=1e-5, description="probability that epsilon does not hold; below 1 / samples"
    )
    target_epsilon: Positive | None = Field(
        default=None, description="epsilon of the whole run, from which the noise follows"
    )
    accountant: Literal["prv", "rdp"] = Field(
        default="prv", description="prv: tight; rdp: Rényi divergences, quick, some per cent above"
    )
    sampling: Literal["poisson", "shuffle"] = Field(
        default="poisson",
        description="poisson: each sample is in a batch with probability global_batch / samples; shuffle: the usual"
        " order, for which epsilon is much larger",
    )
    key: str | None = Field(
        default=None,
        min_length=1,
        description="file of 32 secret bytes from which noise and batches are drawn; absent: from the seed, for trials:"
        " who knows that can subtract the noise",
    )

    @property
    def pins(self) -> tuple[str, ...]:
        return ("privacy", "train.steps") if self.target_epsilon is not None else ("privacy",)

    def fidelity(self, plan: Any) -> Fidelity:
        """Stages add up the squares of a sample's norm, each its own first."""
        return Fidelity.EXACT if plan.pp == 1 else Fidelity.ROUNDING

    def problems(self, recipe: Any, plan: Any) -> Iterator[Problem]:
        if (self.noise is None) == (self.target_epsilon is None):
            what = (
                "[privacy] says neither noise nor target_epsilon"
                if self.noise is None
                else "[privacy] says both"
            )
            yield Problem(
                "C06", what, "privacy.noise, privacy.target_epsilon", "one of noise and target_epsilon"
            )
        if math.isinf(self.clip) and (self.noise or self.target_epsilon):
            what = "noise is a multiple of privacy.clip, which is infinite"
            yield Problem("C06", what, "privacy.clip, privacy.noise", "a finite clip, or noise = 0")
        if recipe.federated is None:  # else it protects clients, whose own steps are plain
            yield from _training_problems(recipe.train)
            yield from _plan_problems(plan)


def _training_problems(train: Any) -> Iterator[Problem]:
    """Keys of [train] that would look at single samples without noise, or for which these have no gradients."""
    for key, on, why in (
        ("guard", train.guard > 0, "computes micro-batches twice"),
        ("on_bad", train.on_bad != "stop", "leaves steps out by what the data are"),
        ("spike", train.spike > 0, "judges steps by what the data are"),
        ("quarantine", train.quarantine, "leaves micro-batches out by what the data are"),
        ("optimizer", _looks(train.optimiser()), "follows gradients that have no noise yet"),
        ("compile", train.compile, "compiles blocks that have no gradients by sample"),
        (
            "loss",
            bool(train.loss) and LOSSES.read(train.loss).teaching() is not None,
            "computes on whole batches",
        ),
    ):
        if on:
            what = f"train.{key} {why}, which [privacy] cannot account for"
            yield Problem("P40", what, f"train.{key}, privacy", f"leave train.{key} out")


def _looks(optimiser: Any) -> bool:
    return optimiser.paced or bool(optimiser.observed)


def _plan_problems(plan: Any) -> Iterator[Problem]:
    """Axes and options under which the norm of a sample's gradient is known nowhere, or another."""
    plain, schedule = Plan(), named("schedule", plan.schedule)
    for key in ("cp", "ep"):
        if getattr(plan, key) != 1:
            what = f"{key}={getattr(plan, key)} leaves each rank with a part of a sum over a sample's positions, and"
            yield Problem("P40", f"{what} its norm with nobody", f"plan.{key}, privacy", f"{key}=1")
    for key in ("sync", "codec", "recompute", "offload"):
        if plan.text(key) != plain.text(key):
            what = f"{key}={plan.text(key)} is not available with [privacy]: {_WHY[key]}"
            yield Problem("P40", what, f"plan.{key}, privacy", f"{key}={plain.text(key)}")
    if schedule is not None and (not schedule.flushed or schedule.chains > 1):
        what = f"schedule={plan.text('schedule')} is not available with [privacy]: {_WHY['schedule']}"
        yield Problem("P40", what, "plan.schedule, privacy", f"schedule={plain.text('schedule')}")
    if isinstance(plan.tp, Grid) or plan.chunks > 1:
        what = f"tp={plan.text('tp')} is not available with [privacy]: {_WHY['tp']}"
        yield Problem("P40", what, "plan.tp, privacy", f"tp={int(plan.tp)}")
    if plan.wires.gather or plan.wires.scatter:
        what = f"zero={plan.text('zero')} rounds gradients before they have noise"
        yield Problem("P40", what, "plan.zero, privacy", f"zero={plan.zero}")
    if plan.precision not in ("fp32", "fp64"):
        what = f"precision={plan.precision} rounds gradients of samples before they are clipped"
        yield Problem("P40", what, "plan.precision, privacy", "precision=fp32 or fp64")


_WHY = {
    "sync": "replicas must add noise once to one sum, in each step",
    "codec": "it would look at gradients that have no noise yet",
    "schedule": "a sample's norm is the sum over stages of one copy of the model, with weights of one step",
    "tp": "samples are computed one after the other, of one row of ranks",
    "recompute": "gradients of samples are computed by torch.func, which keeps what it needs",
    "offload": "gradients of samples are computed by torch.func, on weights that are here",
}
