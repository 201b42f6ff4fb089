"""Prices of measured hosts that are nearer than they can be right: the simpler plan is taken, and it is said."""

from dataclasses import replace

import pytest

from tests.planner.test_host import HOST, MODEL, here
from unisono.plan import Plan
from unisono.planner import ties
from unisono.planner.clusters import cluster
from unisono.planner.machines.cluster import Device
from unisono.planner.search import search
from unisono.planner.simulate import Question, simulate
from unisono.planner.space import Space
from unisono.planner.stack import stack
from unisono.planner.trust import untried
from unisono.planner.why import why

WHERE = replace(here(), device=Device("cpu", {"fp32": 1e11}, 1e12, 1e11))


def answer(plan: str, batch: int = 16, where=WHERE):
    asked = Plan.parse(plan).fill(Plan.parse(plan).world)
    micros = asked.micros or 1
    size = batch // asked.dp // asked.shard // micros
    return simulate(Question(MODEL, asked, where, stack("plain-cpu"), size, micros))


def costing(plan: str, step: float):
    """The plan's answer with another price."""
    found = answer(plan)
    return replace(found, price=replace(found.price, step=step))


@pytest.mark.parametrize(
    ("fewer", "more"),
    [
        ("dp=2 pp=2 schedule=gpipe micros=1", "dp=2 pp=2 schedule=gpipe micros=2"),
        ("dp=4", "shard=4 zero=3"),
        ("shard=4 zero=2", "shard=4 zero=3"),
        ("pp=2 micros=4", "pp=4 micros=4"),
        ("dp=2", "tp=2"),
    ],
)
def test_meetings_are_counted(fewer, more):
    assert 0 < ties.meetings(answer(fewer).question) < ties.meetings(answer(more).question)


def test_a_pipeline_of_two_meets_once_for_every_message():
    """A rank at its end sends or receives one activation and one gradient for each micro-batch."""
    assert ties.meetings(answer("pp=2 micros=4").question) == 8


def test_of_prices_that_are_too_near_the_simpler_plan_is_first_and_the_rest_keep_their_order():
    low, high = costing("tp=4", 1.0), costing("dp=4", 1.0 + 0.9 * ties.SHARE * HOST.error)
    last = costing("dp=2 tp=2", 1.5)
    assert ties.simplest([low, high, last]) == [high, low, last]
    far = costing("dp=4", 1.0 + 1.1 * ties.SHARE * HOST.error)
    assert ties.simplest([low, far, last]) == [low, far, last]
    assert ties.simplest([]) == []


def test_why_the_quicker_price_is_not_taken_is_said():
    low, high = costing("tp=4", 1.0), costing("dp=4", 1.02)
    said = why(low, high)
    assert "2.0 % quicker by its price" in said and "7.5 %" in said and "not 1" in said
    assert "slower" in why(high, low)


@pytest.mark.parametrize("held", ["precision=bf16", "precision=bf16 cp=2"])
def test_on_devices_what_nobody_measured_is_first_only_where_it_gains_more_than_it_may_be_off(held):
    """With cp held, which no row has, it counts against none."""
    within = Space(MODEL, cluster("dgx-h100:8"), stack("plain"), 64, None, Plan.parse(held))
    found = search(within, 40).best
    plain, best = within.stack, found[0].question.plan
    bold = set(untried(Plan.parse(held), plain))
    assert set(untried(best, plain)) == bold
    rest = [one.price.step for one in found[1:]]
    assert rest == sorted(rest)
    for one in found:
        if one.price.step * (1.0 + ties.margin(one.question)) < found[0].price.step:
            raise AssertionError(f"{one.question.plan} is surely quicker than {best}")
    quicker = [one for one in found if one.price.step < 0.999 * found[0].price.step]
    assert all(why(one, found[0]).startswith("bolder: might gain") for one in quicker)


def test_of_two_measured_plans_the_quicker_is_first():
    asks = [device_answer("shard=8 zero=3"), device_answer("shard=8 zero=1")]
    low, high = sorted(asks, key=lambda one: one.price.step)
    assert ties.simplest([low, high]) == [low, high]
    bold = device_answer("shard=8 zero=1 cp=1 pp=1")
    other = device_answer("shard=4 zero=1 cp=2")
    near = replace(other, price=replace(other.price, step=0.9 * bold.price.step))
    far = replace(other, price=replace(other.price, step=0.5 * bold.price.step))
    assert ties.simplest([near, bold]) == [bold, near]
    assert ties.simplest([far, bold]) == [far, bold]


def device_answer(plan: str):
    asked = Plan.parse(f"{plan} precision=bf16")
    return simulate(Question(MODEL, asked, cluster("dgx-h100"), stack("plain"), 1, 8 // asked.shard))


def test_what_a_search_chooses_is_the_simplest_of_the_near_ones():
    found = search(Space(MODEL, WHERE, stack("plain-cpu"), 16, None, Plan()), 200)
    quickest = min(one.price.step for one in found.best)
    near = [one for one in found.best if one.price.step <= (1 + ties.margin(one.question)) * quickest]
    assert found.best[0] in near
    assert ties.meetings(found.best[0].question) == min(ties.meetings(one.question) for one in near)
    rest = [one.price.step for one in found.best[1:]]
    assert rest == sorted(rest)
