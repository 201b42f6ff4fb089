"""Ranges of blocks have a price: that of the plans between which they lie, and their own where the search finds one."""

from dataclasses import replace

import pytest

from tests.planner.published import gpt
from unisono.plan import Plan
from unisono.planner.clusters import cluster
from unisono.planner.cuts import rows_of
from unisono.planner.grouping import in_order, in_rows, numbers_of
from unisono.planner.memory import MARGIN
from unisono.planner.mixed_blocks import between
from unisono.planner.simulate import PlanRequest, PlanResult, simulate
from unisono.planner.stack import stack

MODEL = gpt(16, 16, 2048, 2048)


def answer(
    text: str, where: str = "dgx-a100:2", made: str = "plain", gib: float = 0.0, micros: int = 8
) -> PlanResult:
    on = cluster(where)
    if gib:
        on = replace(on, device=replace(on.device, memory=gib * 2.0**30))
    plan = Plan.parse(f"{text} precision=bf16 micros={micros}")
    return simulate(PlanRequest(MODEL, plan, on, stack(made), 2, micros))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("uniform", "said"),
    [
        ("shard=16 recompute=full", "recompute=full"),
        ("dp=2 shard=8 zero=2", "zero=2,recompute=none"),
        ("dp=8 tp=2 recompute=full", "recompute=full"),
        ("shard=4 pp=2 tp=2 schedule=interleaved:v=2 recompute=full", "recompute=full"),
        ("dp=4 pp=4 schedule=zb1p", "recompute=none"),
        ("dp=4 pp=4 schedule=dualpipe recompute=full", "recompute=full"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("where", ["dgx-a100:2"])
def test_a_range_of_all_blocks_costs_what_saying_it_of_the_plan_costs(
    uniform: str, said: str, where: str
) -> None:
    usual = uniform.replace(" recompute=full", "")
    one, other = answer(uniform, where), answer(f"{usual} blocks=0-15:{said}", where)
    assert other.price.step == pytest.approx(one.price.step, rel=1e-12)
    assert other.verdict.memory.total == pytest.approx(one.verdict.memory.total, rel=1e-12)
    for axis, traffic in one.price.comm.items():
        assert other.price.comm[axis].bytes == pytest.approx(traffic.bytes, rel=1e-12)
    assert other.price.recompute == pytest.approx(one.price.recompute, rel=1e-9)


@pytest.mark.parametrize(
    ("usual", "said"),
    [
        ("shard=16", "recompute=full"), ("shard=16", "zero=1"), ("shard=4 pp=4 zero=3", "zero=2"),
        ("dp=4 pp=4 schedule=zb1p", "recompute=full"),
    ],
)  # fmt: skip
def test_more_blocks_move_time_and_memory_one_way_and_evenly(usual: str, said: str) -> None:
    some = [answer(f"{usual} blocks=0-{n}:{said}") for n in range(16)]
    steps, bytes_ = [one.price.step for one in some], [one.verdict.memory.total for one in some]
    for values in (steps, bytes_):
        rising = values[-1] > values[0]
        assert values == sorted(values, reverse=not rising)
        assert len(set(values)) >= 4
    assert (steps[-1] > steps[0]) == (bytes_[-1] < bytes_[0])  # what is saved is paid for


def test_blocks_that_tp_leaves_whole_send_keys_in_the_place_of_activations() -> None:
    some = [answer("tp=8 dp=2"), *(answer(f"tp=8 dp=2 blocks=0-{n}:tp=1") for n in (3, 7, 15))]
    params = [one.verdict.memory.params for one in some]
    assert params == sorted(params)
    assert params[-1] == pytest.approx(8 * params[0], rel=0.15)  # the ends are still dealt
    assert all("tp" in one.price.comm and "cp" not in one.price.comm for one in some)
    assert (
        some[-1].price.comm["tp"].after > 0 == some[0].price.comm["tp"].after
    )  # gradients are summed over tp


def test_every_row_has_its_own_blocks() -> None:
    plan = Plan.parse("pp=4 schedule=interleaved:v=2 micros=8 blocks=0-3:recompute=full")
    rows = numbers_of(MODEL, plan)
    assert sorted(n for row in rows for n in row) == list(range(16))
    for row, numbers in enumerate(rows):
        modes = [one.recompute for one in in_order(MODEL, plan, row)]
        assert modes == ["full" if n <= 3 else "none" for n in numbers]
    shares = in_rows(MODEL, plan, rows_of(MODEL, plan.schedule, 4, True))
    assert sum(one.blocks for row in shares for one in row if one.plan.recompute == "full") == 4


@pytest.mark.parametrize("text", ["shard=16 recompute=full", "pp=4 dp=4 recompute=full", "shard=16 zero=3"])
def test_as_many_blocks_as_fit_are_played_the_quicker_way(text: str) -> None:
    found = 0
    for gib in (5, 8, 10, 12, 16, 28, 29, 31, 32):
        base = answer(text, gib=gib)
        for ask in between(base.request, frozenset()) if base.verdict.is_safe else ():
            got = simulate(ask)
            found += 1
            assert got.verdict.is_safe and got.price.step < base.price.step
            assert got.verdict.memory.total > base.verdict.memory.total
            if base.request.plan.pp == 1:  # one more block would not fit
                first = int(ask.plan.blocks.partition("-")[0].partition(":")[0])
                more = replace(ask.plan, blocks=ask.plan.blocks.replace(f"{first}", f"{first - 1}", 1))
                over = simulate(replace(ask, plan=more)).verdict
                assert over.memory.total * (1.0 + MARGIN) > over.capacity
    assert found


def test_what_is_held_stays() -> None:
    base = answer("shard=16 recompute=full zero=3", gib=10)
    keys = [ask.plan.blocks.partition(":")[2].partition("=")[0] for ask in between(base.request, frozenset())]
    assert {"recompute", "zero"} >= set(keys) and keys
    assert not list(between(base.request, frozenset({"recompute", "zero"})))
    assert not list(between(base.request, frozenset({"blocks"})))
