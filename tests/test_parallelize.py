"""What one rank holds: which passes a plan asks for, and in which order."""

from functools import partial
from types import SimpleNamespace

import pytest

from unisono.parallel.pass_context import PassContext
from unisono.parallelize import PASSES
from unisono.plan import Plan
from unisono.plan.blocks import options_of
from unisono.spec.layout import Anatomy


def asked(plan, **more):
    stages = [range(2)]
    context = SimpleNamespace(
        **{
            "plan": Plan.parse(plan),
            "each": options_of(Plan.parse(plan), tuple(stages)),
            "owners": {},
            "compiled": False,
            "virtual": 1,
            "anatomy": Anatomy(),
            "blocks": stages,
            **more,
        }
    )
    context.puts_away = partial(PassContext.puts_away, context)
    return [one.name for one in PASSES if one.wanted(context)]


@pytest.mark.parametrize(
    ("plan", "more", "names"),
    [
        ("dp=4", {}, ["fill"]),
        ("pp=2", {"owners": {"head": "stem"}}, ["untie", "fill", "share"]),
        ("tp=2", {}, ["split", "positions", "fill"]),
        ("tp=2 cp=2", {"virtual": 4}, ["virtual shards", "fill"]),
        ("shard=2 recompute=full", {"compiled": True}, ["fill", "recompute", "compile", "shard"]),
    ],
)
def test_a_plan_asks_for_the_passes_that_it_needs(plan, more, names):
    assert asked(plan, **more) == names


def test_there_is_one_order():
    order = [one.name for one in PASSES]
    for first, second in (
        ("untie", "fill"),  # each use draws its own value
        ("split", "fill"),  # parts of values are taken where cuts are known
        ("fill", "share"),  # there is no storage before
        ("share", "shard"),  # FSDP2 looks for parameters that are one
        ("recompute", "shard"),  # and hooks the forward that it finds
        ("compile", "shard"),
    ):
        assert order.index(first) < order.index(second), (first, second)
