"""What is offloaded leaves the device, costs the host link, and is in the host's memory."""

from dataclasses import replace

import pytest

from tests.planner.published import gpt
from unisono.plan import Plan
from unisono.planner.clusters import cluster
from unisono.planner.memory import Again, of_row
from unisono.planner.price import Price, computed_again, price
from unisono.planner.priced import verdict
from unisono.planner.simulate import DoesNotFit, Question, demand, simulate
from unisono.planner.stack import stack

MODEL, WHERE, MADE = gpt(32, 32, 4096, 2048), cluster("dgx-a100:2"), stack("megatron-2022")


def step(text: str, micro_batch: int = 2) -> Price:
    plan = Plan.parse(f"precision=bf16 {text}")
    return price(MODEL, plan, WHERE, MADE, micro_batch=micro_batch, micros=8)


def fits(text: str, micro_batch: int = 2, micros: int = 8):
    plan = Plan.parse(f"precision=bf16 {text}")
    return verdict(MODEL, plan, MADE, WHERE, micro_batch=micro_batch, micros=micros)


@pytest.mark.parametrize("mode", ["optimizer", "params", "activations"])
@pytest.mark.parametrize("mesh", ["tp=8", "shard=8 tp=2", "tp=4 pp=4", "shard=4 pp=2 tp=2 zero=1"])
def test_offloading_takes_time_for_memory(mode: str, mesh: str) -> None:
    before, after = (
        of_row(MODEL, Plan.parse(f"precision=bf16 {mesh} {key}"), MADE, micro_batch=2, micros=8, row=0)
        for key in ("", f"offload={mode}")
    )
    assert after.total < before.total and before.host == 0.0
    assert after.host == pytest.approx(before.allocated - after.allocated)
    assert fits(f"{mesh} offload={mode}").memory.total < fits(mesh).memory.total
    assert step(f"{mesh} offload={mode}").step >= step(mesh).step


def test_the_optimisers_states_go_once_each_way() -> None:
    whole = sum(MODEL.block_parameters) * 32  # of 8 bytes of moments and 4 of the master copy
    got = step("tp=1 offload=optimizer")
    rate = 31.5e9 * MADE.host_link
    assert got.optimizer >= 12 * whole / rate
    assert got.optimizer == pytest.approx(12 * MODEL.workload.parameters / rate, rel=0.01)


def test_a_slow_host_link_shows_and_a_fast_one_does_not() -> None:
    def shown(rate: float) -> float:
        where = replace(WHERE, device=replace(WHERE.device, host=rate))
        plan = Plan.parse("precision=bf16 tp=8 offload=activations")
        return price(MODEL, plan, where, MADE, micro_batch=2, micros=8).comm["host"].exposed

    assert shown(5e9) > shown(20e9) > shown(1e12) == 0.0


def test_the_host_has_an_end_too() -> None:
    small = replace(WHERE, device=replace(WHERE.device, host_memory=1e9))
    plan = Plan.parse("precision=bf16 tp=8 offload=optimizer")
    got = verdict(MODEL, plan, MADE, small, micro_batch=1, micros=8)
    assert not got.fits and got.short == pytest.approx(got.memory.host - 1e9)
    ask = Question(MODEL, plan, small, MADE, 1, 8)
    with pytest.raises(DoesNotFit) as caught:
        demand(simulate(ask))
    assert "host" in caught.value.what


def test_as_few_layers_are_computed_again_as_just_fit() -> None:
    mesh = "shard=2 tp=8 zero=1"
    sizes = [b for b in (1, 2, 4, 8, 16, 32) if fits(f"{mesh} recompute=full", b).fits]
    between = [b for b in sizes if not fits(mesh, b).fits]
    assert between, sizes
    for b in between:
        plan = Plan.parse(f"precision=bf16 {mesh} recompute=auto")
        (again,) = computed_again(MODEL, plan, WHERE, MADE, micro_batch=b, micros=8)
        assert 0 < again.selective + again.full <= 32
        assert (again.selective, again.full) == (int(again.selective), int(again.full))
        assert fits(f"{mesh} recompute=auto", b).fits
        for fewer in (Again(again.selective - 1, again.full), Again(again.selective, again.full - 1)):
            if min(fewer.selective, fewer.full) >= 0:
                memory = of_row(MODEL, plan, MADE, micro_batch=b, micros=8, row=0, again=fewer)
                assert memory.total > WHERE.device.memory - WHERE.device.reserved
        assert (
            step(mesh, b).step
            < step(f"{mesh} recompute=auto", b).step
            < step(f"{mesh} recompute=full", b).step
        )
    small = step(f"{mesh} recompute=auto", 1)
    assert small.again == (Again(),) and small.step == step(mesh, 1).step


def test_the_parts_still_add_up() -> None:
    for text in (
        "tp=4 pp=4 offload=params", "shard=4 cp=4 offload=activations recompute=full", "cp=4 tp=4 cp_kind=ulysses",
        "shard=2 tp=8 recompute=auto", "dp=2 pp=8 schedule=dualpipe", "pp=4 tp=2 cp=2 schedule=zbv recompute=auto",
    ):  # fmt: skip
        got = step(text, 4)
        parts = (
            got.arithmetic, got.kernels, got.recompute, got.host, got.idle, got.uneven, got.optimizer, got.fixed, got.exposed
        )  # fmt: skip
        assert sum(parts) == pytest.approx(got.step), text
        assert got.host >= -1e-9 * got.step, text
