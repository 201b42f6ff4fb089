"""Canonical mode: one set of weights, to the last bit, for any number of replicas, shards and stages."""

import pytest

from tests.threads import prove
from unisono.config import ModelConfig, Recipe, TrainConfig, resolve
from unisono.plan import Plan
from unisono.spec.errors import ConfigProblems

pytestmark = pytest.mark.timeout(300)

PLANS = ["shard=2 zero=3", "shard=2 zero=1", "dp=2 shard=2 zero=2", "dp=2 pp=2"]
MORE = ["dp=2", "shard=2 zero=2", "pp=2"]


def recipe(global_batch=12, **train):
    model = ModelConfig(n_layer=2, n_head=2, d_model=16, context=8, dropout=0.1)
    given = {
        "steps": 6,
        "global_batch": global_batch,
        "micro_batch": 1,
        "lr": 1e-2,
        "warmup_steps": 2,
        "clip": 0.5,
    }
    return Recipe(seed=3, model=model, train=TrainConfig(**{**given, **train}))


def canonical(text):
    return Plan.parse(f"{text} sync=canonical")


@pytest.mark.parametrize(
    ("plans", "steps"), [(PLANS, 2), pytest.param(PLANS + MORE, 3, marks=pytest.mark.slow)]
)
def test_float32_weights_are_the_same_bits(plans, steps):
    twelve = prove(recipe(12), [canonical("dp=3")], steps)
    eight = prove(recipe(8), [canonical(text) for text in plans], steps)
    for proof in (*twelve, *eight):
        assert proof.fidelity == "EXACT" and proof.bit_identical and proof.passed, proof


def test_without_it_replicas_round_differently():
    (proof,) = prove(recipe(8), [Plan.parse("dp=4")], steps=2)
    assert proof.passed and not proof.bit_identical


def test_ranks_that_do_not_hold_whole_branches_are_refused():
    with pytest.raises(ConfigProblems, match="power of two"):
        resolve(recipe(12), canonical("dp=2"))
    assert resolve(recipe(12), canonical("dp=1")).batch.micros == 12


def test_weights_put_away_take_the_same_steps_through_their_stand_ins():
    """Of heads and biases that tp has cut to lengths that fill no register."""
    for proof in prove(recipe(8), [canonical("tp=2 offload=params"), canonical("offload=params")], steps=2):
        assert proof.passed, proof
