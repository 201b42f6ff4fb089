"""Sparse models: published counts follow from the architecture; memory and time move as they have to."""

from dataclasses import replace

import pytest

from unisono.plan import Plan
from unisono.planner import memory
from unisono.planner.clusters import cluster
from unisono.planner.collectives import exchange
from unisono.planner.formatting import waterfall
from unisono.planner.hf_config import transformer_of
from unisono.planner.price import price
from unisono.planner.simulate import PlanRequest, simulate
from unisono.planner.stack import stack
from unisono.planner.work.experts import Experts
from unisono.planner.work.megatron_activations import block_bytes
from unisono.planner.work.transformer import Transformer

MIXTRAL = {
    "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768,
    "num_experts_per_tok": 2, "num_local_experts": 8,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "n_shared_experts": 1, "n_routed_experts": 256, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "qk_nope_head_dim": 128, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "max_position_embeddings": 163840,
}  # fmt: skip
SMALL = Transformer(
    8,
    8,
    512,
    1024,
    1000,
    8,
    2048,
    bias=False,
    gated=True,
    rms=True,
    learned=False,
    experts=Experts(8, 2, 1024),
)
WHERE = cluster("dgx-h100:4")


def step(model: Transformer, text: str, micro: int = 2, micros: int = 4, nodes: int = 4):
    plan, where = Plan.parse(f"precision=bf16 {text}"), cluster(f"dgx-h100:{nodes}")
    return price(model, plan, where, stack("plain"), micro_batch=micro, micros=micros)


def total(model: Transformer, text: str) -> memory.Memory:
    plan = Plan.parse(f"precision=bf16 {text}")
    return memory.of_row(model, plan, stack("plain"), micro_batch=2, micros=4, row=0)


def padded(model: Transformer, text: str) -> memory.Memory:
    """With software that fills its experts' room up."""
    plan, other = Plan.parse(f"precision=bf16 {text}"), replace(stack("plain"), autograd=False)
    return memory.of_row(model, plan, other, micro_batch=2, micros=4, row=0)


def test_mixtral_has_its_parameters() -> None:
    """46.7 billion, of which a token meets 12.9 (Jiang et al., "Mixtral of experts", 2024)."""
    model = transformer_of(MIXTRAL)
    assert model is not None
    assert round(model.workload.parameters / 1e9, 1) == 46.7
    assert round(model.workload.active / 1e9, 1) == 12.9


def test_deepseek_has_its_parameters() -> None:
    """671 billion, of which a token meets 37 (DeepSeek-V3 report, 2024); latent attention is modelled."""
    model = transformer_of(DEEPSEEK)
    assert model is not None
    assert round(model.workload.parameters / 1e9) == 671
    assert int(model.workload.active / 1e9) == 37


def test_arithmetic_is_that_of_what_a_token_meets() -> None:
    """About two operations an active parameter and token, and attention (Kaplan et al., 2020)."""
    model = transformer_of(MIXTRAL, 2048)
    assert model is not None
    products = model.workload.active - 4096 * 32000 - (2 * 32 + 1) * 4096  # without embedding and norms
    attention = 2 * 2 * 2048 * 4096 * 32
    assert model.workload.flops / 2048 == pytest.approx(2 * products + attention, rel=1e-9)
    few = replace(SMALL, experts=Experts(8, 1, 1024))
    assert few.workload.flops < SMALL.workload.flops
    assert few.workload.parameters == SMALL.workload.parameters


def test_one_expert_for_all_is_the_dense_layer() -> None:
    """But for the router: parameters, products and what is kept."""
    dense = replace(SMALL, experts=None)
    one = replace(SMALL, experts=Experts(1, 1, 2048))
    router = 8 * 512
    assert one.workload.parameters == dense.workload.parameters + router == one.workload.active
    assert one.workload.flops == dense.workload.flops + 2 * 1024 * router
    more = block_bytes(one, micro_batch=1) - block_bytes(dense, micro_batch=1)
    # Tokens on their way to the expert and back, and the router's numbers.
    assert more == pytest.approx(1024 * (2 * 2 * 512 + 8))


@pytest.mark.parametrize(
    ("every", "dense", "sparse"),
    [(1, 0, range(8)), (2, 0, (1, 3, 5, 7)), (1, 3, range(3, 8)), (2, 3, (4, 6))],
)
def test_layers_that_are_sparse(every: int, dense: int, sparse: range | tuple[int, ...]) -> None:
    some = Experts(8, 2, 1024, every=every, dense=dense)
    assert [n for n in range(8) if some.sparse(n)] == list(sparse)
    for a in range(9):
        for b in range(a, 9):
            assert some.layers(a, b) == sum(some.sparse(n) for n in range(a, b))


def test_experts_are_dealt_and_nothing_is_lost() -> None:
    """Whatever the mesh, the ranks of a replica hold every expert equally often."""
    every = SMALL.n_layer * SMALL.layer_experts
    for text in (
        "tp=8 ep=8",
        "tp=8 ep=2",
        "shard=8 ep=4 zero=1",
        "shard=4 tp=2 ep=8 zero=1",
        "tp=4",
        "shard=8",
    ):
        plan = Plan.parse(f"precision=bf16 {text}")
        share = memory.share_of(SMALL, plan, 0, False)
        copies, ranks = plan.shard * plan.tp * share.routed / every, share.ranks
        assert copies == pytest.approx(round(copies)) and copies >= 1, text
        assert plan.shard % ranks == 0 and ranks <= copies
    for rows in (2, 4):
        parts = [memory.share_of(SMALL, Plan(pp=rows), row, False).routed for row in range(rows)]
        assert sum(parts) == pytest.approx(every)


def test_more_expert_ranks_take_less_memory_and_more_network() -> None:
    alone, dealt = total(SMALL, "shard=8 zero=1"), total(SMALL, "shard=8 zero=1 ep=8")
    assert dealt.params < alone.params and dealt.grads < alone.grads
    # ZeRO deals the optimiser either way.
    assert dealt.optim == pytest.approx(alone.optim)
    assert "ep" not in step(SMALL, "shard=8 zero=1").comm
    near, far = (step(SMALL, f"shard={n} zero=1 ep=8 dp={32 // n}").comm["ep"] for n in (8, 8))
    assert near == far and near.exposed == near.seconds > 0
    assert near.bytes == pytest.approx(4 * 8 * 4 * (7 / 8) * 2 * 1024 * 2 * 512 * 2)


def test_an_exchange_across_nodes_takes_the_cards() -> None:
    inside, across = exchange(WHERE, 1, 8), exchange(WHERE, 1, 32)
    moved = 1e9
    assert inside.all_to_all(moved) == pytest.approx(inside.hops + 7 / 8 * moved / WHERE.links[0].bus)
    assert across.all_to_all(moved) == pytest.approx(across.hops + 24 / 32 * moved / WHERE.links[1].bus)
    assert sum(inside * (ways - 1) for inside, ways, _ in across.reach) == 31


def test_imbalance_and_capacity_cost() -> None:
    def with_(**given: float) -> Transformer:
        return replace(SMALL, experts=replace(SMALL.experts or Experts(1, 1, 1), **given))

    even, uneven, full = (
        step(m, "shard=8 ep=8 zero=1") for m in (SMALL, with_(load=2.0), with_(capacity=2.0))
    )
    assert uneven.step > even.step and uneven.step == full.step
    assert uneven.comm["ep"].seconds > even.comm["ep"].seconds
    assert padded(with_(capacity=2.0), "ep=8 shard=8").activations > padded(SMALL, "ep=8 shard=8").activations
    assert total(with_(capacity=2.0), "ep=8 shard=8") == total(SMALL, "ep=8 shard=8")


def test_dualpipe_hides_the_exchange() -> None:
    shown = step(SMALL, "pp=2 shard=8 ep=8 zero=1", micros=8).comm["ep"]
    hidden = step(SMALL, "pp=2 shard=8 ep=8 zero=1 schedule=dualpipev", micros=8).comm["ep"]
    assert shown.exposed == shown.seconds == pytest.approx(hidden.seconds)
    assert hidden.exposed < 0.1 * hidden.seconds


def test_the_parts_add_up() -> None:
    for text in (
        "shard=8 ep=8",
        "tp=8 ep=8 dp=2",
        "tp=4 ep=8 shard=4 zero=2 pp=2 recompute=full",
        "tp=8 ep=2",
    ):
        ask = PlanRequest(SMALL, Plan.parse(f"precision=bf16 {text}"), WHERE, stack("plain"), 2, 4)
        got = simulate(ask)
        assert sum(seconds for _, seconds in waterfall(got)) == pytest.approx(got.price.step), text
        assert got.price.host >= -1e-9 * got.price.step, text


def test_tokens_that_go_by_all_to_all_are_not_summed_on_tp() -> None:
    """Of a block's two pairs of collectives a sparse layer's pair is gone; both seconds and bytes."""
    wide, own = step(SMALL, "tp=4").comm["tp"], step(SMALL, "tp=4 ep=4").comm["tp"]
    assert own.bytes == pytest.approx(wide.bytes / 2)
    assert own.seconds == pytest.approx(wide.seconds / 2)
