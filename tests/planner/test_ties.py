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


def test_devices_of_their_own_are_chosen_by_price_alone():
    found = search(
        Space(MODEL, cluster("dgx-h100:8"), stack("plain"), 16, None, Plan.parse("precision=bf16")), 40
    )
    steps = [one.price.step for one in found.best]
    assert steps == sorted(steps)


def test_what_a_search_chooses_is_the_simplest_of_the_near_ones():
    found = search(Space(MODEL, WHERE, stack("plain-cpu"), 16, None, Plan()), 200)
    quickest = min(one.price.step for one in found.best)
    near = [one for one in found.best if one.price.step <= (1 + ties.margin(one.question)) * quickest]
    assert found.best[0] in near
    assert ties.meetings(found.best[0].question) == min(ties.meetings(one.question) for one in near)
    rest = [one.price.step for one in found.best[1:]]
    assert rest == sorted(rest)
