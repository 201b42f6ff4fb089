"""Which steps of a run are one step of a proof: those of one update. No torch."""

from unisono.plan import Plan
from unisono.plan.grammar import member


def rhythm_of(plan: Plan) -> int:
    """Steps from one update to the next."""
    policy = member("sync", plan.sync)
    return 1 if policy is None else policy.rhythm


def steps_of(plan: Plan, at: int) -> range:
    """Steps of the run that make step `at` of its proof: with `sync=period:4` 8, 9, 10 and 11 make step 2."""
    rhythm = rhythm_of(plan)
    return range(at * rhythm, (at + 1) * rhythm)
