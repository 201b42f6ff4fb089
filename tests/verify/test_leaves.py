"""Replicas with unlike numbers of micro-batches compute what one device computes."""

import pytest

from tests.threads import prove
from unisono.config import ModelConfig, Recipe, TrainConfig
from unisono.plan import Plan

pytestmark = pytest.mark.timeout(300)

ROUNDED = ["dp=2 sync=every_step:speeds=3/1", "dp=2 shard=2 sync=every_step:speeds=1/2"]
MORE = [
    "dp=3 sync=every_step:speeds=2/1/3",
    "dp=2 tp=2 sync=every_step:speeds=3/1",
    "dp=2 pp=2 sync=every_step:speeds=1/3",
    "dp=2 sync=every_step:balance=1",
    "dp=2 shard=2 zero=1 sync=every_step:speeds=3/1",
]
EXACT = ["dp=4 sync=canonical:speeds=1/9/1/1", "dp=4 sync=canonical:balance=1"]


def recipe(batch: int, **model) -> Recipe:
    model = ModelConfig(n_layer=2, n_head=2, d_model=16, context=8, dropout=0.1, **model)
    train = TrainConfig(steps=4, global_batch=batch, micro_batch=1, lr=1e-2, warmup_steps=1, clip=0.5)
    return Recipe(seed=3, model=model, train=train)


@pytest.mark.parametrize("plans", [ROUNDED, pytest.param(MORE, marks=pytest.mark.slow)])
def test_sums_alone_differ(plans: list[str]) -> None:
    double = recipe(12)
    double = double.model_copy(update={"train": double.train.model_copy(update={"dtype": "float64"})})
    for proof in prove(double, [Plan.parse(f"{text} precision=fp64") for text in plans], steps=2):
        assert proof.fidelity == "ROUNDING" and proof.passed, proof


def test_in_canonical_mode_no_bit_differs() -> None:
    for proof in prove(recipe(8), [Plan.parse(text) for text in EXACT], steps=2):
        assert proof.fidelity == "EXACT" and proof.bit_identical and proof.passed, proof
