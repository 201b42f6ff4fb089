"""What a step waits for beside its own work: ranks that are slow today."""

from dataclasses import replace
from functools import lru_cache

from unisono.plan import Plan
from unisono.planner.parts import Price
from unisono.planner.stragglers import Law, Pace, pace


def computing(got: Price) -> float:
    """Seconds of a step, without what it waits for, in which ranks do not talk with other replicas: what is random
    about it."""
    return got.bare.step - (got.comm["dp"].exposed if "dp" in got.comm else 0.0)


def late(got: Price, of: Law, plan: Plan, sync: str = "") -> float:
    """Seconds that ranks wait for slower ones in a step, under the plan's own policy or another. Raises UsageError."""
    return computing(got) * (paced(of, sync or plan.sync, plan.dp, plan.inner).step - 1.0)


def with_waits(got: Price, of: Law | None, plan: Plan) -> Price:
    """The price with stragglers, where there are any. Raises UsageError for a policy that cannot be."""
    if of is None:
        return got
    seconds = late(got, of, plan)
    return replace(got, step=got.step + seconds, straggling=seconds)


@lru_cache(maxsize=256)
def paced(of: Law, sync: str, replicas: int, inner: int) -> Pace:
    """`stragglers.pace`, which may play thousands of steps: a study of what would help asks for the same again."""
    return pace(of, sync, replicas, inner)
