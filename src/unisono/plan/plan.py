"""`Plan`: the keys of a plan, with the checks that keep it from being played.

dp=2 shard=2 zero=3 pp=2 tp=2 schedule=1f1b micros=8 sync=every_step codec=plain precision=bf16
"""

from unisono.plan import checks
from unisono.plan.batch import Batch
from unisono.plan.checks import Devices, RecipeLike
from unisono.plan.keys import PlanKeys
from unisono.spec.errors import Problem

__all__ = ["Batch", "Plan"]


class Plan(PlanKeys):
    """How a run is spread: see `PlanKeys` for the fields. `Plan.parse("dp=2 tp=2")` reads a text."""

    __slots__ = ()

    def check(self, recipe: RecipeLike | None = None, cluster: Devices | None = None) -> list[Problem]:
        """All problems at once: not in this version, meaningless, not fitting the recipe or the cluster."""
        return checks.check(self, recipe, cluster)
