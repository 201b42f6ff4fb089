"""Degrees of tp that divide nothing: heads, keys, widths, vocabulary and positions dealt as evenly as may be."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.threads import prove
from unisono.config import ModelConfig, Recipe, TrainConfig
from unisono.parallel.heads import dealt_heads
from unisono.parallel.parts import ends_of
from unisono.plan import Plan
from unisono.spec.layout import Units

pytestmark = pytest.mark.timeout(300)


def recipe(**model):
    """No size is a multiple of 3 or 4: four heads or more, 7 or 11 positions, and 257 tokens."""
    given = {"n_layer": 2, "n_head": 4, "d_model": 20, "d_ff": 50, "context": 11, "dropout": 0.1, **model}
    train = TrainConfig(
        steps=4, global_batch=4, micro_batch=1, dtype="float64", lr=1e-2, clip=0.5, weight_decay=0.1
    )
    return Recipe(seed=3, model=ModelConfig(**given), train=train)


LLAMA = {"positions": "rotary", "activation": "swiglu", "norm": "rms", "bias": False, "tie_embeddings": False}
CASES = [
    ({}, ["shard=2 tp=3"]),
    pytest.param({}, ["tp=3"], marks=pytest.mark.slow),
    ({"n_kv_head": 2, "d_model": 24, **LLAMA}, ["tp=4 recompute=full", "tp=3 pp=2 schedule=zb1p"]),
    ({"n_head": 6, "d_model": 24, "n_kv_head": 2}, ["dp=2 tp=4 sync=canonical"]),
    pytest.param({"n_head": 6, "d_model": 24, "n_kv_head": 2}, ["tp=4"], marks=pytest.mark.slow),
    ({"n_head": 5, "n_kv_head": 1, "context": 7}, ["tp=4"]),
]  # fmt: skip


@pytest.mark.parametrize(("model", "plans"), CASES)
def test_any_degree_equals_one_device(model, plans):
    for proof in prove(recipe(**model), [Plan.parse(text) for text in plans], steps=2):
        assert proof.passed, proof
        assert max(proof.max_rel_err.values()) < 1e-10, proof


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 12))
def test_each_key_has_one_rank_and_each_query_its_key(keys, queries, ranks):
    """Boxes of the projection tile it; whoever borrows finds a lender, of the very key."""
    units = Units(keys * queries, 3, queries)
    if ranks > units.count:
        return
    ends = ends_of(units.count, ranks)
    held = dealt_heads(units, ends)
    rows = [(units.before(a), units.before(b)) for a, b in pairwise(ends)]
    assert rows[0][0] == 0 and rows[-1][1] == 3 * (keys * queries + 2 * keys)
    assert [sum(one.counts) for one in held] == [b - a for a, b in pairwise(ends)]
    for i, one in enumerate(held):
        here = 3 * sum(one.counts) + 6 * (len(one.counts) - (one.owner is not None))
        assert rows[i][1] - rows[i][0] == here
        if one.owner is not None:
            first = held[one.owner].first
            key = (ends[i + 1] - 1) // queries
            assert one.owner > i and first is not None
            assert rows[one.owner][0] + first == units.before((key + 1) * queries) - 6
