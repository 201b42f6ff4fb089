"""A price adds up, follows the timetable that is played, and moves the way that it has to."""

import pytest

from tests.planner.parts import together
from tests.planner.published import SETS, gpt
from unisono.plan import Plan
from unisono.planner.clusters import cluster
from unisono.planner.collectives import bus
from unisono.planner.price import price, rows
from unisono.planner.stack import stack
from unisono.programs.pipeline import play_costs
from unisono.programs.schedules import one_f_one_b

MODEL = gpt(24, 16, 2048, 2048)


@pytest.mark.parametrize("name", SETS)
def test_the_parts_add_up_to_the_step(name: str) -> None:
    read, named, _ = SETS[name]
    for row in read()[:20]:
        got = price(
            row.model, row.plan, row.cluster, stack(named), micro_batch=row.micro_batch, micros=row.micros
        )
        assert together(got) == pytest.approx(got.step)
        assert min(got.arithmetic, got.kernels, got.idle, got.uneven, got.optimizer) >= 0.0
        assert got.host >= -1e-9 * got.step
        for traffic in got.comm.values():
            assert 0.0 <= traffic.exposed <= traffic.seconds * (1 + 1e-9)


@pytest.mark.parametrize(("micros", "within"), [(4, 0.07), (8, 0.04), (24, 0.03)])
def test_the_closed_form_is_what_the_timetable_plays(micros: int, within: float) -> None:
    plan, where, made = Plan.parse("pp=4 precision=bf16"), cluster("dgx-a100"), stack("plain")
    each = rows(MODEL, plan, where, made, 1)
    played = max(p.stop for p in play_costs(one_f_one_b.timetable(4, micros), each.forward, each.backward))
    got = price(MODEL, plan, where, made, micro_batch=1, micros=micros)
    closed = got.step - got.optimizer - got.fixed - got.exposed
    assert closed == pytest.approx(played, rel=within)


def test_a_group_with_all_devices_of_a_node_uses_all_its_cards() -> None:
    where = cluster("dgx-a100:8")
    alone, together = bus(where, 8, 8), bus(where, 1, 64)
    assert alone.rate == pytest.approx(25e9)
    assert together.rate == pytest.approx(200e9)
    assert bus(where, 1, 8).rate > together.rate


def test_more_of_what_costs_costs_more() -> None:
    made = stack("plain")

    def step(text: str, name: str = "dgx-a100:4", micro: int = 1, micros: int = 8) -> float:
        plan = Plan.parse(f"precision=bf16 {text}")
        return price(MODEL, plan, cluster(name), made, micro_batch=micro, micros=micros).step

    assert step("dp=8 recompute=full") > step("dp=8")
    assert step("dp=8", "dgx-v100:4") > step("dp=8") > step("dp=8", "dgx-h100:4")
    assert step("pp=4") > step("pp=4 schedule=interleaved:v=2") > step("pp=4 schedule=zb2p")
    assert step("dp=8", micros=16) > step("dp=8", micro=2)
    assert step("cp=8", micro=4) < step("cp=1", micro=4)


def test_tensor_parallelism_across_nodes_waits_longer() -> None:
    def waited(tp: int) -> float:
        plan = Plan.parse(f"precision=bf16 tp={tp}")
        got = price(MODEL, plan, cluster("dgx-h100:4"), stack("plain"), micro_batch=4, micros=1)
        return got.comm["tp"].exposed / got.step

    assert waited(16) > waited(8) > waited(2) > 0
