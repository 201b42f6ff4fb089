"""One count: closed forms of what a step sends and keeps are held to the program itself, rehearsed without numbers."""

from dataclasses import replace

import pytest

from tests.planner.rehearsed import KINDS, covered, model, recipe, rehearsed, sent
from unisono.config import resolve
from unisono.plan import Plan
from unisono.planner.clusters import cluster
from unisono.planner.grouping import is_uniform
from unisono.planner.pricing import closed
from unisono.planner.request import PlanRequest
from unisono.planner.stack import stack
from unisono.planner.timetables import of
from unisono.planner.work.replica_traffic import leafwise

DENSE = [kind for kind, config in KINDS.items() if not (config.attends and config.deals("ep"))]
QUICK = 6  # plans of a kind in the quick suite; the slow one takes all


def priced(kind: str) -> list[Plan]:
    """Plans with one stage a rank that have a price on devices. Named collectives are for ranks on CPUs, and send as
    much; what policies and codecs declare is held to what they send by tests/conformance."""
    plans = [plan for plan in covered(kind) if len(of(plan.schedule).placement(2)) == 2]
    usual = Plan()
    plain = [
        replace(
            plan,
            collective=usual.collective,
            codec=usual.codec,
            sync=plan.sync if leafwise(plan) else usual.sync,
        )
        for plan in plans
        if not without_price(kind, plan)
    ]
    return [*dict.fromkeys(plain)]


def without_price(kind: str, plan: Plan) -> bool:
    """Whether a plan has no price on dgx-a100 by design, where it is refused: it offloads, and nobody has said how fast
    its copies are; the device multiplies no numbers of eight bits; blocks of networks are no ranges."""
    away = plan.offload != "none" or "offload=" in plan.blocks
    return away or plan.arithmetic.fp8 or not (KINDS[kind].attends or is_uniform(plan))


def held(kind: str, plan: Plan) -> None:
    """Bytes by axis: of the fullest row what meets once a step, else of the mean one."""
    resolved, many = resolve(recipe(kind), str(plan), plan.world).plan, plan.pp
    ask = PlanRequest(model(kind), resolved, cluster("dgx-a100:1"), stack("plain"), 1, resolved.micros or 1)
    rows = [sent(seen, 1000) for seen in rehearsed(kind, plan)]
    for axis, traffic in closed(ask).comm.items():
        if (axis, kind) == ("tp", "convnet") and plan.precision != "fp32":
            continue  # autocast computes norms in fp32 on a device, in the narrow type on a CPU
        most, mean = max(row[axis] for row in rows), sum(row[axis] for row in rows) / many
        # On tp stem and head have no price; a leaf's second use of a tied weight is one more gradient. Codes of weights of
        # models as small as these have more scales, and more vectors beside matrices, than a price counts.
        near = 0.15 if axis == "tp" else 0.06 if plan.wires.gather else 0.02
        if axis == "shard" and many > 1 and not is_uniform(plan):
            # Some of a row's blocks meet once a step and some in each pass, which calls do not tell apart: the mean
            # of these, and what the fullest row has of those.
            assert mean * (1 - near) <= traffic.bytes <= (mean + most) * (1 + near), f"{plan}: {axis}"
            continue
        want = most if axis == "dp" or (axis == "shard" and plan.zero < 3) else mean
        assert traffic.bytes == pytest.approx(want, rel=near), f"{plan}: {axis}"


@pytest.mark.parametrize("kind", DENSE)
def test_what_is_priced_is_what_is_sent(kind: str) -> None:
    """Experts on devices are priced as other programs send their tokens."""
    plans = priced(kind)
    for plan in plans[:: max(1, len(plans) // QUICK)]:
        held(kind, plan)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", DENSE)
def test_what_is_priced_is_what_is_sent_under_every_pair_of_values(kind: str) -> None:
    for plan in priced(kind):
        held(kind, plan)
