"""Plans that prices cannot tell apart: the surer one is taken, and it is said."""

from dataclasses import replace

import pytest

from tests.planner.cores import MODEL
from unisono.plan import Plan
from unisono.planner import tie_breaks
from unisono.planner.clusters import cluster
from unisono.planner.error_bars import untried
from unisono.planner.explanation import why
from unisono.planner.search import search
from unisono.planner.simulate import PlanRequest, simulate
from unisono.planner.space import Space
from unisono.planner.stack import stack


@pytest.mark.parametrize("held", ["precision=bf16", "precision=bf16 cp=2"])
def test_on_devices_what_nobody_measured_is_first_only_where_it_gains_more_than_it_may_be_off(held):
    """With cp held, which no row has, it counts against none."""
    within = Space(MODEL, cluster("dgx-h100:8"), stack("plain"), 64, None, Plan.parse(held))
    found = search(within, 40).best
    plain, best = within.stack, found[0].request.plan
    bold = set(untried(Plan.parse(held), plain))
    assert set(untried(best, plain)) == bold
    rest = [one.price.step for one in found[1:]]
    assert rest == sorted(rest)
    for one in found:
        if one.price.step * (1.0 + tie_breaks.unsure(one.request)) < found[0].price.step:
            raise AssertionError(f"{one.request.plan} is surely quicker than {best}")
    quicker = [one for one in found if one.price.step < 0.999 * found[0].price.step]
    assert all(why(one, found[0]).startswith("bolder: might gain") for one in quicker)


def test_of_two_measured_plans_the_quicker_is_first():
    asks = [device_answer("shard=8 zero=3"), device_answer("shard=8 zero=1")]
    low, high = sorted(asks, key=lambda one: one.price.step)
    assert tie_breaks.simplest([low, high]) == [low, high]
    bold = device_answer("shard=8 zero=1 cp=1 pp=1")
    other = device_answer("shard=4 zero=1 cp=2")
    near = replace(other, price=replace(other.price, step=0.9 * bold.price.step))
    far = replace(other, price=replace(other.price, step=0.5 * bold.price.step))
    assert tie_breaks.simplest([near, bold]) == [bold, near]
    assert tie_breaks.simplest([far, bold]) == [far, bold]


def device_answer(plan: str):
    asked = Plan.parse(f"{plan} precision=bf16")
    return simulate(PlanRequest(MODEL, asked, cluster("dgx-h100"), stack("plain"), 1, 8 // asked.shard))
