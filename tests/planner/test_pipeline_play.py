"""Steps by event simulation: what is told is what the timetable takes, and near its closed form."""

import pytest

from tests.planner.published import gpt
from unisono.plan import Plan
from unisono.planner import pipeline_play
from unisono.planner.clusters import cluster
from unisono.planner.formatting import waterfall
from unisono.planner.pipeline_play import span
from unisono.planner.price import price
from unisono.planner.simulate import PlanRequest, simulate
from unisono.planner.stack import stack
from unisono.planner.transformers import detail
from unisono.programs.pipeline import play_costs
from unisono.programs.schedules import SCHEDULES

MODEL = gpt(48, 16, 2048, 2048)
NAMES = (
    "1f1b", "gpipe", "interleaved:v=2", "looped_bfs:v=3", "zb1p", "zb2p", "zbv", "dualpipe", "dualpipev",
)  # fmt: skip


@pytest.mark.parametrize("made", ["plain", "megatron-2022"])
@pytest.mark.parametrize("schedule", NAMES)
def test_the_simulated_step_is_near_its_closed_form(schedule: str, made: str) -> None:
    plan = Plan.parse(f"pp=4 dp=2 schedule={schedule} precision=bf16")
    for micros, within in ((8, 0.1), (16, 0.06), (40, 0.03)):
        ask = PlanRequest(MODEL, plan, cluster("dgx-a100"), stack(made), 2, micros)
        got = simulate(ask).price
        closed = price(MODEL, plan, ask.cluster, ask.stack, micro_batch=2, micros=micros)
        # Of uneven rows and parts the closed form knows the means alone.
        assert (1.0 - within) * closed.step <= got.step <= 1.05 * closed.step, micros
        assert got.idle >= 0.0 and got.busiest == closed.busiest
        assert sum(s for _, s in waterfall(simulate(ask))) == pytest.approx(got.step)


def test_the_simulated_step_is_what_is_played() -> None:
    plan, where, made = Plan.parse("pp=4 precision=bf16"), cluster("dgx-a100"), stack("plain")
    each = detail(MODEL, plan, where, made, 1).rows
    table = SCHEDULES.read("1f1b").timetable(4, 12)
    costs = ([f + each.send for f in each.forward], [b + each.send for b in each.backward])
    whole = max(p.stop for p in play_costs(table, *costs))
    got = simulate(PlanRequest(MODEL, plan, where, made, 1, 12)).price
    beside = got.optimizer + got.fixed + price(MODEL, plan, where, made, micro_batch=1, micros=12).exposed
    beside -= 2 * each.send * (12 + 3)
    assert got.step == pytest.approx(whole + beside)


@pytest.mark.parametrize("schedule", NAMES)
def test_many_micro_batches_are_as_if_all_were_played(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, where, made = (
        Plan.parse(f"pp=4 schedule={schedule} precision=bf16"),
        cluster("dgx-a100"),
        stack("plain"),
    )
    each = detail(MODEL, plan, where, made, 2).rows
    whole = span(schedule, 48, 48, each)
    monkeypatch.setattr(pipeline_play, "FEW", 0)
    span.cache_clear()
    assert span(schedule, 48, 48, each) == pytest.approx(whole, rel=2e-3)


def test_what_has_no_timetable_is_not_played() -> None:
    each = detail(MODEL, Plan.parse("pp=4"), cluster("dgx-a100"), stack("plain"), 1).rows
    assert span("interleaved:v=2", 48, 6, each) is None
    assert span("accumulate", 48, 8, each) is None
