"""Plans with five axes above one, on sixteen ranks: a small model with experts, against one device."""

import pytest

from tests.threads import prove
from unisono.config import ModelConfig, Recipe, TrainConfig
from unisono.plan import Plan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PLANS = (
    "dp=2 pp=2 cp=2 tp=2 ep=2",
    "dp=2 pp=2 cp=2 tp=2 ep=4 cp_kind=ulysses",
    "dp=2 pp=2 cp=2 tp=2 ep=2 cp_kind=gather recompute=full",
    "dp=2 pp=2 cp=2 tp=2 ep=4 schedule=zb1p",
    "dp=2 pp=2 cp=2 tp=2 ep=2 schedule=interleaved:v=2 recompute=selective",
    "shard=2 pp=2 cp=2 tp=2 ep=2",
    "shard=2 pp=2 cp=2 tp=2 ep=8 zero=1",
    "shard=2 pp=2 cp=2 tp=2 ep=4 zero=2 cp_kind=ulysses",
    "dp=2 shard=2 cp=2 tp=2 ep=4",
    "dp=2 shard=2 pp=2 tp=2 ep=2 schedule=gpipe recompute=full",
)


@pytest.mark.parametrize("text", PLANS)
def test_five_axes_at_once_are_one_device(text: str) -> None:
    model = ModelConfig(
        kind="moe",
        n_layer=4,
        n_head=4,
        d_model=16,
        context=16,
        n_experts=8,
        top_k=2,
        dropout=0.1,
        aux_loss=0.01,
    )
    train = TrainConfig(
        steps=3, global_batch=8, micro_batch=1, lr=1e-2, warmup_steps=1, clip=0.5, dtype="float64"
    )
    (proof,) = prove(
        Recipe(seed=3, model=model, train=train), [Plan.parse(f"{text} precision=fp64")], steps=2
    )
    assert proof.ranks == 16 and proof.passed, proof
