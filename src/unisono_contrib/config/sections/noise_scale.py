"""`[noise_scale]`: measure the gradient noise scale while a run trains."""

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import Field

from unisono.plan import Plan
from unisono.plan.grammar import named
from unisono.spec.errors import Problem
from unisono.spec.fidelity import Fidelity
from unisono.spec.section import Section
from unisono.spec.training import Share


class NoiseScaleConfig(Section):
    """The gradient noise scale (McCandlish et al., 2018) of each step, as `noise_scale` in metrics.jsonl and as a curve
    in the report: in samples, the batch above which more samples a step gain little."""

    name: ClassVar[str] = "noise_scale"

    smoothing: Share = Field(
        default=0.95,
        description="decay of the exponential means of noise and signal, of which noise_scale is the quotient",
    )

    def problems(self, recipe: Any, plan: Plan) -> Iterator[Problem]:
        yield from unmeasurable(plan, "noise_scale")
        yield from computed_otherwise(recipe, "noise_scale")


def unmeasurable(plan: Any, where: str) -> Iterator[Problem]:
    """Why gradients of micro-batches have no norms of their own under this plan. where: the key that wants them."""
    for key in ("cp", "ep"):
        if getattr(plan, key) != 1:
            what = f"with {key}={getattr(plan, key)} no rank has the gradient of a micro-batch by itself"
            yield Problem("P44", what, f"plan.{key}, {where}", "dp=N shard=S tp=T, with pp=P if needed")
    if plan.shard > 1 and plan.wires.scatter:
        what = f"zero={plan.text('zero')} changes the norm of the sum, not those of its parts"
        yield Problem("P44", what, f"plan.zero, {where}", "leave wire and scatter out")
    plain = Plan()
    if plan.text("codec") != plain.text("codec"):
        what = f"codec={plan.text('codec')} changes the norm of the sum, not those of its parts"
        yield Problem("P44", what, f"plan.codec, {where}", f"codec={plain.text('codec')}")
    policy = named("sync", plan.sync)
    if policy is not None and (policy.fidelity is Fidelity.LOSSY or policy.rhythm != 1 or policy.update_lag):
        what = f"under sync={plan.sync} an update is not the mean of the gradients of one step"
        yield Problem("P44", what, f"plan.sync, {where}", f"sync={plain.text('sync')}")
    schedule = named("schedule", plan.schedule)
    whole = (
        schedule and schedule.flushed and not schedule.halves and len(schedule.placement(plan.pp)) == plan.pp
    )
    if plan.pp > 1 and not whole:
        what = f"schedule={plan.text('schedule')} computes gradients of a micro-batch in parts"
        yield Problem("P44", what, f"plan.schedule, {where}", "schedule=1f1b")


def computed_otherwise(recipe: Any, where: str) -> Iterator[Problem]:
    """Keys of a recipe under which a micro-batch has not one gradient. where: the key that wants it."""
    for key, on in (("train.guard", recipe.train.guard > 0), ("privacy", getattr(recipe, "privacy", None))):
        if on:
            what = f"{key} computes gradients of a micro-batch more than once, or none"
            yield Problem("P44", what, f"{key}, {where}", f"leave {key} out")
