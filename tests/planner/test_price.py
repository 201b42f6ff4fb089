"""A price adds up, follows the timetable that is played, and moves the way that it has to."""

from dataclasses import replace

import pytest

from tests.planner.parts import together
from tests.planner.published import SETS, gpt
from unisono.plan import Plan
from unisono.planner.clusters import cluster
from unisono.planner.collectives import bus
from unisono.planner.price import price
from unisono.planner.stack import stack
from unisono.planner.transformers import detail
from unisono.programs.pipeline import play_costs
from unisono.programs.schedules import SCHEDULES

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
    each = detail(MODEL, plan, where, made, 1).rows
    played = max(
        p.stop for p in play_costs(SCHEDULES.read("1f1b").timetable(4, micros), each.forward, each.backward)
    )
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


@pytest.mark.parametrize("micros", [1, 6])
def test_each_way_to_shard_sends_what_its_page_says(micros: int) -> None:
    """docs/sharding.md, in parameters: 2 a step, 1 + one a micro-batch, 3 a micro-batch (2 of what is no block)."""
    made, where, n = stack("plain"), cluster("dgx-a100:4"), 8

    def sent(zero: int) -> float:
        plan = Plan.parse(f"precision=bf16 shard={n} zero={zero}")
        return price(MODEL, plan, where, made, micro_batch=1, micros=micros).comm["shard"].bytes

    blocks, whole = MODEL.block_parameters[0] * MODEL.n_layer, MODEL.workload.parameters
    gradient, weight = made.reduce_bytes, 4  # in fp32, as our own runs keep them
    assert sent(1) == pytest.approx((n - 1) / n * whole * (gradient + weight), rel=1e-3)
    assert sent(2) == pytest.approx((n - 1) / n * whole * (micros * gradient + weight), rel=1e-3)
    every = blocks * (2 * weight + gradient) + (whole - blocks) * (weight + gradient)
    assert sent(3) == pytest.approx((n - 1) / n * micros * every, rel=1e-3)


def test_gradients_that_are_handed_over_every_time_show_on_a_slow_link() -> None:
    made, where = stack("plain"), cluster("dgx-a100:4")
    slow = replace(where, links=(where.links[0], replace(where.links[1], bandwidth=1e9)))

    def step(zero: int, micros: int) -> float:
        plan = Plan.parse(f"precision=bf16 shard=32 zero={zero}")
        return price(MODEL, plan, slow, made, micro_batch=1, micros=micros).step

    once = 31 / 32 * MODEL.workload.parameters * made.reduce_bytes / (8 * 1e9 * made.dp_bus)
    assert step(2, 1) == pytest.approx(step(1, 1))
    assert step(2, 9) - step(1, 9) == pytest.approx(8 * once, rel=0.2)


def test_ranks_that_see_other_tokens_sum_their_gradients() -> None:
    made, where, micros, n = stack("plain"), cluster("dgx-a100:4"), 4, 4

    def got(text: str):
        plan = Plan.parse(f"precision=bf16 {text}")
        return price(MODEL, plan, where, made, micro_batch=1, micros=micros)

    # Keys and values go round forward and backward, and their gradients in fp32; the gradients are summed once.
    ring = 4 * (n - 1) * 2048 / n * 2 * MODEL.kv_width * 2 * MODEL.n_layer * micros
    summed = 2 * (n - 1) / n * MODEL.workload.parameters * made.reduce_bytes
    assert got(f"cp={n}").comm["cp"].bytes == pytest.approx(ring + summed, rel=1e-3)
    # Where there is a shard axis, cp's ranks deal out the states with it, and their gradients take the same way.
    dealt = got(f"shard=2 cp={n} zero=2").comm
    assert dealt["cp"].bytes == pytest.approx(ring)
    both = (2 * n - 1) / (2 * n) * MODEL.workload.parameters * (micros * made.reduce_bytes + 4)
    assert dealt["shard"].bytes == pytest.approx(both, rel=1e-3)
    assert together(got(f"cp={n}")) == pytest.approx(got(f"cp={n}").step)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("pp", [1, 2])
def test_embedding_and_classifier_are_gathered_and_scattered_too_under_zero_3(tied: bool, pp: int) -> None:
    """Once a micro-batch each way, and nothing hides it; a tied weight twice where its ends lie apart."""
    where, made, micros, more = cluster("dgx-a100:2"), stack("plain"), 4, 8192
    plan = Plan.parse(f"shard=8 zero=3 pp={pp} precision=bf16")

    def shown(vocab: int) -> tuple[float, float]:
        model = replace(gpt(24, 16, 2048, 2048, vocab=vocab), tied=tied)
        traffic = price(model, plan, where, made, micro_batch=1, micros=micros).comm["shard"]
        return traffic.bytes, traffic.exposed

    net = bus(where, 1, 8, made.dp_bus)
    matrices = 1 if tied and pp == 1 else 2
    elements = more * 2048.0 * matrices
    sent, seconds = (b - a for a, b in zip(shown(51200), shown(51200 + more), strict=True))
    rounds = micros / pp
    both = 4 + made.reduce_bytes  # weights in fp32, as our own runs keep them
    assert sent == pytest.approx(rounds * 7 / 8 * elements * both)
    assert seconds == pytest.approx(rounds * both * 7 / 8 * elements / net.rate)


def test_under_zero_3_gradients_cross_in_the_dtype_in_which_they_are_summed() -> None:
    where, plan = cluster("dgx-a100:2"), Plan.parse("shard=16 zero=3 precision=bf16")
    each = [
        price(MODEL, plan, where, replace(stack("plain"), reduce_bytes=n), micro_batch=1, micros=4).comm[
            "shard"
        ]
        for n in (2, 4)
    ]
    # Blocks: gathered twice at 4 bytes and scattered at 2 or 4; the ends gathered once.
    assert 12 / 10 < each[1].bytes / each[0].bytes < 8 / 6
    assert each[1].seconds > each[0].seconds


def test_our_own_runs_send_in_the_weights_dtype() -> None:
    """docs/memory.md: what crosses between stages and replicas keeps the weights' type. Others send what they compute."""
    where, plan = cluster("dgx-a100"), Plan.parse("pp=2 shard=2 zero=3")

    def sent(name: str, precision: str) -> tuple[float, float]:
        own = replace(plan, precision=precision)
        comm = price(replace(MODEL, tied=False), own, where, stack(name), micro_batch=1, micros=4).comm
        return comm["pp"].bytes, comm["shard"].bytes

    assert sent("plain", "bf16") == sent("plain", "fp32")
    messages = [sent("megatron-2022", precision)[0] for precision in ("bf16", "fp32")]
    assert messages[1] == 2 * messages[0]
