"""Convnets and MLPs under tp: by columns, then by rows, with whole groups of channels between."""

import pytest

from tests.threads import prove
from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig
from unisono.plan import Plan

pytestmark = pytest.mark.timeout(300)


def recipe(**model):
    train = TrainConfig(
        steps=4, global_batch=12, micro_batch=3, dtype="float64", lr=1e-2, clip=0.5, weight_decay=0.1
    )
    return Recipe(
        seed=3, model=ModelConfig(dropout=0.1, **model), data=DataConfig(source="digits"), train=train
    )


@pytest.mark.parametrize(
    ("model", "plans"),
    [
        ({"kind": "convnet", "n_layer": 3, "channels": 8}, ["tp=2 pp=2 recompute=full", "tp=3 dp=2", "shard=2 tp=2"]),
        ({"kind": "mlp", "hidden": (13, 7)}, ["tp=3 pp=2", "shard=2 tp=3"]),
    ],
)  # fmt: skip
def test_dealt_channels_equal_one_device(model, plans):
    for proof in prove(recipe(**model), [Plan.parse(text) for text in plans], steps=2):
        assert proof.passed, proof
        assert max(proof.max_rel_err.values()) < 1e-10, proof
