"""What a timetable without a flush (PipeDream) cannot be joined with."""

from collections.abc import Iterator
from typing import Any

from unisono.plan.grammar import member, problem_of
from unisono.plan.keys import PlanKeys
from unisono.spec.errors import Problem


def unflushed(plan: PlanKeys, recipe: Any) -> Iterator[Problem]:
    """A timetable with the update inside makes it before all stages have their gradients, and its backwards use weights
    that are not the newest."""
    schedule = None if problem_of("schedule", plan.schedule) else member("schedule", plan.schedule)
    if plan.pp == 1 or getattr(schedule, "flushed", True):
        return
    plain, train = type(plan)(), getattr(recipe, "train", None)
    clip, guard = getattr(train, "clip", 0), getattr(train, "guard", 0)
    answers = [
        f"train.{key}={value}".lower()
        for key, plain_one in (("on_bad", "stop"), ("spike", 0.0), ("quarantine", False))
        if (value := getattr(train, key, plain_one)) != plain_one
    ]
    said = f"schedule={plan.schedule} updates each stage for itself"
    for wrong, why, key, fix in (
        (plan.sync != plain.sync, f"and sync={plan.sync} makes one update for all", "plan.sync", f"sync={plain.sync}"),
        (plan.shard > 1, f"from versions of weights that shard={plan.shard} does not keep", "plan.shard",
         f"dp={plan.shard}"),
        (plan.offload != plain.offload, f"which offload={plan.offload} has no room for", "plan.offload",
         f"offload={plain.offload}"),
        (recipe is not None and bool(recipe.model.deals("ep")), "and experts or tables are balanced by all at"
         " once", "model.kind", "another model"),
        (plan.precision == "fp16", "and precision=fp16 plays a step again that overflows in any", "plan.precision",
         "precision=bf16"),
        (answers, f"before anyone knows whether it is a bad step, which {' and '.join(answers)} would answer",
         "train.on_bad", "train.on_bad = \"stop\" without spike and quarantine"),
        (plan.arithmetic.narrow, "from copies of weights that are of one precision",
         "plan.precision", f"precision={plan.precision}"),
        (clip, f"before the norm of the whole model is known, which train.clip={clip} needs", "train.clip",
         "--train.clip 0"),
        (guard, f"so a step cannot be computed twice, as train.guard={guard} asks", "train.guard", "--train.guard 0"),
    ):  # fmt: skip
        if wrong:
            yield Problem("P24", f"{said}, {why}", f"plan.schedule, {key}", f"{fix}, or schedule=1f1b")
