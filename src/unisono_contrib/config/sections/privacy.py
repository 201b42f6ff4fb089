"""`[privacy]`: how much a run may reveal of any one sample (`unisono train`) or client (`unisono federate`)."""

import math
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from unisono.plan import Plan
from unisono.spec.errors import Problem
from unisono.spec.section import Section
from unisono.spec.training import LOSSES, NotNegative, Positive


class PrivacyConfig(Section):
    """Differential privacy: what each sample, or in federated rounds each client, adds to an update is clipped, and
    noise hides it."""

    name: ClassVar[str] = "privacy"

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
    """Axes and options under which a rank does not hold the whole gradient of a sample."""
    plain = Plan()
    for key in ("pp", "tp", "cp", "ep", "shard"):
        if getattr(plan, key) != 1:
            what = f"a rank of {key}={getattr(plan, key)} does not hold the whole gradient of a sample, by which it is"
            yield Problem("P40", f"{what} clipped", f"plan.{key}, privacy", "dp=N micros=M")
    for key in ("sync", "codec", "schedule", "recompute", "offload"):
        if plan.text(key) != plain.text(key):
            what = f"{key}={plan.text(key)} is not available with [privacy]: {_WHY[key]}"
            yield Problem("P40", what, f"plan.{key}, privacy", f"{key}={plain.text(key)}")
    if plan.precision not in ("fp32", "fp64"):
        what = f"precision={plan.precision} rounds gradients of samples before they are clipped"
        yield Problem("P40", what, "plan.precision, privacy", "precision=fp32 or fp64")


_WHY = {
    "sync": "replicas must add noise once to one sum, in each step",
    "codec": "it would look at gradients that have no noise yet",
    "schedule": "a sample's gradient is computed by one rank at once",
    "recompute": "gradients of samples are computed by torch.func, which keeps what it needs",
    "offload": "gradients of samples are computed by torch.func, on weights that are here",
}
