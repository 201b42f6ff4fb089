"""What every price keeps, whatever is asked: parts that add up, and no step that gets shorter where it cannot."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.planner.published import gpt
from unisono.plan import Plan
from unisono.planner import clusters, stack
from unisono.planner.error_bars import trust
from unisono.planner.machines.chip import chip, matmul
from unisono.planner.machines.cluster import Cluster
from unisono.planner.price import price
from unisono.planner.price_parts import Price
from unisono.planner.work.transformer import Transformer

MODELS = {
    "125M": gpt(12, 12, 768, 2048), "3.6B": gpt(32, 32, 3072, 2048), "7B": gpt(32, 32, 4096, 4096, noisy=False),
    "18.4B": gpt(40, 48, 6144, 2048), "39.1B": gpt(48, 64, 8192, 2048), "175B": gpt(96, 96, 12288, 2048),
    "1T": gpt(128, 160, 25600, 2048),
}  # fmt: skip
NODES = st.sampled_from([1, 2, 4, 8, 16, 64, 128, 512])
SIZES = st.sampled_from([1, 1, 2, 3, 4, 6, 8, 12, 16])


@st.composite
def asked(draw: st.DrawFn) -> tuple[Transformer, Plan, Cluster, stack.Stack, int, int]:
    """A model, a plan, a cluster that holds it, a stack, a micro-batch, and micro-batches."""
    model = MODELS[draw(st.sampled_from(list(MODELS)))]
    name = draw(st.sampled_from([name for name in clusters.names() if name != "laptop"]))
    where = clusters.cluster(f"{name}:{draw(NODES)}")
    tp, pp, shard, cp = draw(SIZES), draw(SIZES), draw(SIZES), draw(st.sampled_from([1, 1, 1, 2]))
    spare = where.devices // (tp * pp * shard * cp)
    assume(spare and model.n_head % tp == 0 and model.n_layer >= pp)
    plan = Plan(
        dp=spare, tp=tp, pp=pp, shard=shard, cp=cp, zero=draw(st.sampled_from([1, 2, 3])), precision="bf16",
        recompute=draw(st.sampled_from(["none", "selective", "full"])), schedule="1f1b",
    )  # fmt: skip
    made = stack.stack(draw(st.sampled_from(stack.names())))
    return (
        model,
        plan,
        where,
        made,
        draw(st.sampled_from([1, 2, 3, 4, 8, 32])),
        draw(st.sampled_from([1, 2, 7, 32, 256])),
    )


def cost(
    model: Transformer, plan: Plan, where: Cluster, made: stack.Stack, micro_batch: int, micros: int
) -> Price:
    return price(model, plan, where, made, micro_batch=micro_batch, micros=micros)


@given(asked())
@settings(max_examples=60, deadline=None)
def test_parts_are_there_and_add_up(ask: tuple[Transformer, Plan, Cluster, stack.Stack, int, int]) -> None:
    got = cost(*ask)
    parts = (
        got.arithmetic,
        got.kernels,
        got.recompute,
        got.host,
        got.idle,
        got.uneven,
        got.optimizer,
        got.fixed,
    )
    assert min(parts) >= -1e-9 * got.step
    assert sum(parts) + got.exposed == pytest.approx(got.step)
    for traffic in got.comm.values():
        assert 0.0 <= traffic.exposed <= traffic.seconds * (1 + 1e-9) and traffic.bytes > 0.0
    model, plan, where, made, micro_batch, micros = ask
    if made.fused_attention:
        return  # computes only the half of the scores that is not masked
    ideal = model.step_flops(micro_batch * micros * plan.dp * plan.shard) / plan.world
    assert got.step >= ideal / where.device.flops("bf16")


@given(asked(), st.sampled_from(["peak", "memory", "links", "latency"]), st.floats(1.05, 8.0))
@settings(max_examples=60, deadline=None)
def test_a_better_machine_is_never_slower(
    ask: tuple[Transformer, Plan, Cluster, stack.Stack, int, int], what: str, times: float
) -> None:
    model, plan, where, made, micro_batch, micros = ask
    device, links = where.device, where.links
    if what == "peak":
        device = replace(device, peak={k: v * times for k, v in device.peak.items()})
    elif what == "memory":
        device = replace(device, bandwidth=device.bandwidth * times)
    elif what == "latency":
        links = tuple(replace(link, latency=link.latency / times) for link in links)
    else:
        links = tuple(
            replace(
                link, bandwidth=link.bandwidth * times, ceiling=link.ceiling and link.ceiling * times,
                groups=tuple((n, rate * times) for n, rate in link.groups),
            )
            for link in links
        )  # fmt: skip
    better = replace(where, device=device, links=links)
    assert cost(model, plan, better, made, micro_batch, micros).step <= cost(*ask).step * (1 + 1e-9)


@given(asked())
@settings(max_examples=60, deadline=None)
def test_more_work_takes_longer_and_about_as_much_longer(
    ask: tuple[Transformer, Plan, Cluster, stack.Stack, int, int],
) -> None:
    model, plan, where, made, micro_batch, micros = ask
    once = cost(*ask).step
    more = cost(model, plan, where, made, micro_batch, micros + 1).step
    later = cost(model, plan, where, made, micro_batch, micros + 2).step
    assert once < more < later
    # Each further micro-batch costs the same, and at most what all cost on average with the pipeline's fill.
    assert later - more == pytest.approx(more - once, rel=1e-6)
    # As long where what is sent takes longer than what is computed beside it.
    assert cost(model, plan, where, made, micro_batch + 1, micros).step >= once
    deep = [
        cost(replace(model, n_layer=n * plan.pp), plan, where, made, micro_batch, micros).step
        for n in (
            16,
            32,
            64,
        )  # many beside one block more or less, and beside the head that balanced cuts weigh
    ]
    assert deep[0] < deep[1] < deep[2] <= 2 * deep[1]
    # Beside what hides gradients, twice the further layers take twice the further time.
    assert deep[2] - deep[1] == pytest.approx(2 * (deep[1] - deep[0]), rel=0.25)


@given(
    st.sampled_from(["v100-32gb", "a100-80gb", "h100-80gb", "tpu-v4"]), st.floats(1, 9000), st.floats(16, 9000),
    st.floats(1, 9000), st.sampled_from([1.0, 8.0]),
)  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_a_larger_product_is_never_faster_and_no_step_is_a_cliff(
    name: str, rows: float, inner: float, columns: float, batch: float
) -> None:
    on = chip(clusters.device(name), stack.stack("plain"), "bf16", 2)
    once = matmul(on, rows, inner, columns, batch)
    for larger in (
        matmul(on, rows * 1.01, inner, columns, batch),
        matmul(on, rows, inner * 1.01, columns, batch),
        matmul(on, rows, inner, columns * 1.01, batch),
    ):
        # A last wave that is begun for one tile: at most half of two waves is empty.
        assert once * (1 - 1e-9) <= larger <= once * 1.02 * 2**on.wave


@given(asked())
@settings(max_examples=60, deadline=None)
def test_a_price_is_trusted_less_the_further_it_is_from_what_was_fitted(
    ask: tuple[Transformer, Plan, Cluster, stack.Stack, int, int],
) -> None:
    model, plan, where, made, _, _ = ask
    sets = [replace(made, families=(rows,)) for rows in made.families] or [made]
    assert trust(model, plan, where, made).error in [trust(model, plan, where, one).error for one in sets]
    for one in sets:
        got, own = trust(model, plan, where, one), one.families[0] if one.families else one
        assert own.error <= got.error < 1.0
        assert bool(got.because) == (got.error > own.error)
        if own.seen is None:
            continue
        inside = replace(model, context=own.seen.context[0])
        further = replace(model, context=64 * own.seen.context[1])
        assert trust(inside, plan, where, one).error <= got.error
        assert trust(further, plan, where, one).error >= got.error
        other = replace(where, device=replace(where.device, name="something new"))
        assert trust(model, plan, other, one).error >= got.error
        doubled = replace(plan, dp=2 * max(plan.dp, own.seen.ranks[1]))
        halved = replace(doubled, dp=doubled.dp // 2)
        assert trust(model, doubled, where, one).error > trust(model, halved, where, one).error
