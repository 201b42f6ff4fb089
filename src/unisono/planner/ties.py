"""Plans that prices cannot tell apart: of those, the one whose price is surest.

Where ranks share cores, a price is right within some per cent, most of which plans share; what is left differs most by
how often ranks are woken, whose cost no calibration sees the same twice. On devices of their own, plans share the
stack's error, and what is left is what nobody has measured of a plan: such a plan goes first where it is quicker by
more than it may be off.
"""

from collections.abc import Sequence
from math import hypot, inf
from typing import Annotated

from unisono.planner.kinds import kind
from unisono.planner.simulate import Answer, Question
from unisono.planner.source import Source
from unisono.planner.trust import APART, untried
from unisono.programs.pipeline import COMPUTE, lower
from unisono.programs.schedules import SCHEDULES

_HALF = (
    "a choice of ours, held by benchmarks/auto_truth.py: errors of two plans on one host are half the same"
)
# Of a host's mean error, how far two of its prices have to be apart to say which plan is quicker.
SHARE: Annotated[float, Source("specification", _HALF)] = 0.5


def margin(ask: Question) -> float:
    """By how much, relatively, a price has to be lower than that of a surer plan to mean something."""
    if ask.cluster.host is not None:
        return SHARE * ask.cluster.host.error
    return unsure(ask)  # the stack's own error is that of all its plans


def unsure(ask: Question) -> float:
    """How unsure a price is beside others on its cluster, the surest lowest: on a host of ranks how often its busiest
    rank meets others; on devices the error that techniques add which its stack was not fitted to."""
    if ask.cluster.host is not None:
        return meetings(ask)
    return hypot(*(APART[one] for one in untried(ask.plan, ask.stack)))


def meetings(ask: Question) -> float:
    """How often the busiest rank of a step sends, receives or takes part in a collective, on a host of ranks."""
    model, plan = ask.model, ask.plan
    timetable = lower(SCHEDULES.read(plan.schedule).timetable(plan.pp, ask.micros))
    messages = max(sum(action.kind not in COMPUTE for action in row) for row in timetable.rows)
    rows = [0.0] * plan.pp
    for work, row in zip(
        kind(model).stages(model, plan, ask.micro_batch, ask.micros), timetable.placement, strict=True
    ):
        rows[row] += sum(call.times for calls in work.calls for call in calls)
    return messages + ask.micros * max(rows) / timetable.chains + (plan.dp > 1)


def simplest(answers: Sequence[Answer], most: float = inf) -> list[Answer]:
    """The answers, quickest first; of those too near to the quickest to be told from it, the surest goes to the front.
    most: seconds of a step that it may have: who has a plan is told of no slower one."""
    if not answers:
        return []
    limit = min((1.0 + margin(answers[0].question)) * answers[0].price.step, most)
    near = [one for one in answers if one.price.step <= limit] or [answers[0]]
    first = min(near, key=lambda one: unsure(one.question))  # of equals the quickest
    return [first, *(one for one in answers if one is not first)]
