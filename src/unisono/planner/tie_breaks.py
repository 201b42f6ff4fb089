"""Plans that prices cannot tell apart: of those, the one whose price is surest.

Plans share the stack's error, and what is left is what nobody has measured of a plan: such a plan goes first where it
is quicker by more than it may be off.
"""

from collections.abc import Sequence
from math import hypot, inf

from unisono.planner.error_bars import APART, untried
from unisono.planner.simulate import PlanRequest, PlanResult


def unsure(ask: PlanRequest) -> float:
    """The relative error that a plan's techniques add to its price beside the stack's own, which all plans share: of
    techniques that the stack was not fitted to."""
    return hypot(*(APART[technique] for technique in untried(ask.plan, ask.stack)))


def simplest(answers: Sequence[PlanResult], most: float = inf) -> list[PlanResult]:
    """The answers, quickest first; of those too near to the quickest to be told from it, the surest goes to the front.
    most: seconds of a step that it may have: who has a plan is told of no slower one."""
    if not answers:
        return []
    limit = min((1.0 + unsure(answers[0].request)) * answers[0].price.step, most)
    near = [answer for answer in answers if answer.price.step <= limit] or [answers[0]]
    first = min(near, key=lambda answer: unsure(answer.request))  # of equals the quickest
    return [first, *(answer for answer in answers if answer is not first)]
