"""Adapters beside weights that stay as they are: what learns has gradients, states and messages, and the rest has none."""

from dataclasses import replace

import pytest

from tests.planner.published import gpt
from unisono.plan import Plan
from unisono.planner.clusters import cluster
from unisono.planner.formatting import waterfall
from unisono.planner.simulate import PlanRequest, PlanResult, simulate
from unisono.planner.stack import stack

MODEL = replace(gpt(24, 16, 2048, 2048, noisy=False), tied=False)
RANK = 16


def answer(text: str, rank: int, made: str = "plain") -> PlanResult:
    plan = Plan.parse(f"{text} precision=bf16")
    return simulate(PlanRequest(replace(MODEL, lora=rank), plan, cluster("dgx-h100"), stack(made), 1, 4))


@pytest.mark.parametrize("made", ["plain", "megatron-2024"])
@pytest.mark.parametrize(
    "text",
    ["dp=8", "shard=8 zero=1", "shard=8 zero=2", "shard=8", "dp=2 tp=4", "pp=4 dp=2", "dp=8 recompute=full"],
)
def test_what_does_not_learn_has_no_gradient_no_state_and_no_message(text: str, made: str) -> None:
    every, few = answer(text, 0, made), answer(text, RANK, made)
    learns = few.request.model.learns
    had, has = every.verdict.memory, few.verdict.memory
    assert has.params == had.params
    assert has.grads == pytest.approx(learns * had.grads)
    assert has.optim == pytest.approx(learns * had.optim)
    assert few.price.step < every.price.step
    assert sum(seconds for _, seconds in waterfall(few)) == pytest.approx(few.price.step)
    if "dp" in every.price.comm and "zero" not in text:
        assert few.price.comm["dp"].bytes == pytest.approx(learns * every.price.comm["dp"].bytes)


def test_adapters_are_two_layers_beside_every_product() -> None:
    """Queries, keys and values as one, attention's last, and both of the feed-forward layer."""
    h, blocks = MODEL.d_model, MODEL.n_layer
    elements = blocks * RANK * ((h + 3 * h) + (h + h) + (h + 4 * h) + (4 * h + h))
    model = replace(MODEL, lora=RANK)
    assert model.learns * sum(part.parameters for part in model.workload.parts) == pytest.approx(elements)


def test_a_backward_pass_has_half_of_the_products() -> None:
    """4 of 6 FLOPs a weight and token are left, and all of attention's."""
    whole, some = MODEL.step_flops(1), replace(MODEL, lora=RANK).step_flops(1)
    attention = MODEL.attention_flops(1)
    assert some - attention == pytest.approx((whole - attention) * 2 / 3)
