"""Gradients of single samples have a price in memory: so many as a micro-batch has, of all that a rank computes."""

from dataclasses import replace

import pytest

from unisono.plan import Plan
from unisono.planner.clusters import cluster
from unisono.planner.pricing import verdict
from unisono.planner.request import PlanRequest
from unisono.planner.stack import stack
from unisono.planner.work.transformer import Transformer

MODEL = Transformer(n_layer=4, n_head=4, kv_heads=4, d_model=64, d_ff=256, context=32, vocab=256)


def request(plan: str, micro_batch: int = 4) -> PlanRequest:
    where = cluster("laptop")
    return PlanRequest(MODEL, Plan.parse(plan), where, stack(where.stack), micro_batch, 2, by_sample=True)


@pytest.mark.parametrize("plan, parts", [("dp=1", 1), ("dp=2", 1), ("shard=2 zero=3", 1), ("tp=2", 2)])
def test_each_sample_of_a_micro_batch_costs_the_weights_once(plan: str, parts: int) -> None:
    """Whole ones under `shard`, whatever zero says; a part of them under `tp`."""
    few, more = (verdict(request(plan, size)).memory.grads for size in (4, 12))
    weights = verdict(replace(request("dp=1"), by_sample=False)).memory.params
    assert (more - few) / 8 == pytest.approx(weights / parts, rel=0.05)


def test_shard_gathers_the_weights_for_a_step() -> None:
    sharded = verdict(request("shard=2 zero=3")).memory.params
    assert sharded == pytest.approx(1.5 * verdict(request("dp=1")).memory.params, rel=0.05)


def test_without_them_nothing_changes() -> None:
    usual = verdict(replace(request("dp=2"), by_sample=False)).memory
    assert usual.grads < verdict(request("dp=2")).memory.grads / 4
