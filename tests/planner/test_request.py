"""What every answer keeps, whatever is asked: a waterfall without negative lines that adds up, and no change that helps
in the wrong direction."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.planner.published import gpt
from unisono.plan import Plan
from unisono.planner import clusters
from unisono.planner.formatting import share, summary, waterfall
from unisono.planner.simulate import PlanRequest, PlanResult, simulate
from unisono.planner.stack import names, stack
from unisono.planner.work.transformer import Transformer

LLAMA = Transformer(
    32, 32, 4096, 8192, 128256, 8, 14336, bias=False, tied=False, learned=False, gated=True, rms=True
)  # fmt: skip
MODELS = (gpt(12, 12, 768, 1024), gpt(1, 16, 2048, 2048), gpt(32, 32, 4096, 4096, noisy=False), LLAMA)
SCHEDULES = ("1f1b", "gpipe", "interleaved:v=2", "zb1p", "zbv", "dualpipev", "looped_bfs:v=2")
SIZES = st.sampled_from([1, 1, 1, 2, 4, 8])
CLUSTERS = ("dgx-a100", "dgx-h100", "h100-roce", "dgx-v100", "dgx-b200", "tpu-v4")


@st.composite
def questions(draw: st.DrawFn) -> PlanRequest:
    """Of any model, mesh, timetable, stack, precision and batch that has a price."""
    model, name = draw(st.sampled_from(MODELS)), draw(st.sampled_from(CLUSTERS))
    where = clusters.cluster(f"{name}:{draw(st.sampled_from([1, 2, 8]))}")
    tp, pp, shard, cp = draw(SIZES), draw(SIZES), draw(SIZES), draw(st.sampled_from([1, 1, 2]))
    spare = where.devices // (tp * pp * shard * cp)
    assume(spare and model.n_head % tp == 0 and model.kv_heads % tp == 0 and model.n_layer >= pp)
    eight = "fp8" in where.device.peak and draw(st.booleans())
    plan = Plan(
        dp=spare, tp=tp, pp=pp, shard=shard, cp=cp, zero=draw(st.sampled_from([1, 2, 3])),
        precision="bf16:fp8" if eight else "bf16", schedule=draw(st.sampled_from(SCHEDULES)) if pp > 1 else "1f1b",
    )  # fmt: skip
    sizes = draw(st.sampled_from([1, 2, 8])), draw(st.sampled_from([1, 8, 16]))
    ask = PlanRequest(model, plan, where, stack(draw(st.sampled_from(names()))), *sizes)
    assume(ask.served)
    return ask


def played(ask: PlanRequest, recompute: str) -> PlanResult:
    return simulate(replace(ask, plan=replace(ask.plan, recompute=recompute)))


def need(answer: PlanResult) -> float:
    return answer.verdict.memory.allocated


@given(questions(), st.sampled_from(["none", "selective", "full", "auto"]))
@settings(max_examples=40, deadline=None)
def test_a_waterfall_has_no_negative_line_and_adds_up(ask: PlanRequest, recompute: str) -> None:
    got = played(ask, recompute)
    lines = waterfall(got)
    assert all(seconds > 0.0 for _, seconds in lines)
    assert sum(seconds for _, seconds in lines) == pytest.approx(got.price.step, rel=1e-6)


@given(questions())
@settings(max_examples=25, deadline=None)
def test_less_is_computed_again_in_no_more_time_and_no_less_memory(ask: PlanRequest) -> None:
    none, some, full = (played(ask, mode) for mode in ("none", "selective", "full"))
    close = 1 + 1e-9
    assert none.price.step <= some.price.step * close <= full.price.step * close**2
    assert need(none) * close >= need(some) and need(none) * close >= need(full)


@given(questions(), st.floats(0.05, 1.1))
@settings(max_examples=15, deadline=None)
def test_auto_lies_between_and_fits_where_all_blocks_computed_again_do(ask: PlanRequest, part: float) -> None:
    none, full = played(ask, "none"), played(ask, "full")
    device = ask.cluster.device
    room = need(full) + part * (need(none) - need(full)) + 1.0
    assume(need(none) > need(full))
    less = replace(ask.cluster, device=replace(device, memory=room + device.memory - device.room))
    auto = played(replace(ask, cluster=less), "auto")
    assert auto.verdict.fits and need(auto) <= room * (1 + 1e-9)
    assert none.price.step * (1 - 1e-9) <= auto.price.step <= full.price.step * (1 + 1e-9)


@given(questions())
@settings(max_examples=40, deadline=None)
def test_what_is_dealt_and_what_learns_needs_no_more(ask: PlanRequest) -> None:
    each = [simulate(replace(ask, plan=replace(ask.plan, zero=zero))).verdict.memory for zero in (1, 2, 3)]
    states = [memory.params + memory.grads + memory.optim for memory in each]
    assert states == sorted(states, reverse=True)
    usual, few = simulate(ask), simulate(replace(ask, model=replace(ask.model, lora=8)))
    assert need(few) <= need(usual) and few.verdict.memory.optim < usual.verdict.memory.optim


@given(questions(), st.sampled_from([2, 3]))
@settings(max_examples=40, deadline=None)
def test_more_micro_batches_take_longer_and_no_less_memory(ask: PlanRequest, times: int) -> None:
    more = replace(ask, micros=times * ask.micros)
    assume(more.served)
    one, other = simulate(ask), simulate(more)
    assert one.price.step < other.price.step and need(one) <= need(other) * (1 + 1e-9)


@given(questions())
@settings(max_examples=15, deadline=None)
def test_the_head_of_a_page_and_its_table_say_one_bubble(ask: PlanRequest) -> None:
    """Both are shares of the step."""
    got = played(ask, "none")
    table = dict(waterfall(got)).get("bubble", 0.0) / got.price.step
    assert f"bubble {share(table)};" in dict(summary(got))["speed"]
