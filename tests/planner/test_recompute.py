"""recompute=auto: the quickest of none, selective and full that fits."""

from dataclasses import replace

import pytest

from tests.planner.published import gpt
from unisono.plan import Plan
from unisono.planner.clusters import cluster
from unisono.planner.simulate import Answer, Question, simulate
from unisono.planner.stack import stack

MADE = stack("megatron-2022")


def answer(text: str, gib: float, fused: bool) -> Answer:
    where = cluster("dgx-a100:8")
    where = replace(where, device=replace(where.device, memory=gib * 2.0**30))
    plan, made = Plan.parse(f"precision=bf16 {text}"), replace(MADE, fused_attention=fused)
    return simulate(Question(gpt(32, 32, 4096, 2048), plan, where, made, 2, 8))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "text", ["shard=2 tp=8 zero=1", "pp=8 tp=4", "pp=4 tp=4 dp=2", "pp=4 tp=4 schedule=zbv"]
)
def test_auto_is_the_quickest_of_what_fits(text: str, fused: bool) -> None:
    taken = set[str]()
    for gib in (10, 16, 24, 40, 80):
        ways = [answer(f"{text} recompute={mode}", gib, fused) for mode in ("none", "selective", "full")]
        auto = answer(f"{text} recompute=auto", gib, fused)
        fitting = [one.price.step for one in ways if one.verdict.fits]
        assert auto.verdict.fits == bool(fitting)
        if fitting:
            assert auto.price.step == pytest.approx(min(fitting))
        taken.add(auto.played.recompute)
    assert len(taken) >= 2
