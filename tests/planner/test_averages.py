"""An average of the weights has a price in memory: what a rank is seen to keep of it, sharded as the weights are."""

from dataclasses import replace

import pytest

from tests.planner.rehearsed import corpus, model, recipe
from unisono.comm.imagined import imagined
from unisono.config import Recipe, resolve
from unisono.plan import Plan
from unisono.planner.clusters import cluster
from unisono.planner.pricing import verdict
from unisono.planner.request import PlanRequest
from unisono.planner.stack import stack
from unisono.train.build.rehearsal import rehearse
from unisono_contrib.config.sections.ema import EmaConfig

PLANS = ["dp=1", "dp=2", "shard=2 zero=1", "shard=2 zero=2", "shard=2 zero=3", "tp=2", "dp=2 pp=2"]


def lasting(told: Recipe, kind: str, plan: Plan) -> int:
    """Bytes that the fullest rank of a pipeline keeps between steps."""
    resolved, kept = resolve(told, str(plan), plan.world), list[int]()
    for rank in range(0, plan.world, plan.world // plan.pp):
        with imagined(rank, plan.world) as calls:
            kept.append(rehearse(resolved.recipe, resolved.plan, corpus(kind), rank, calls).lasting)
    return max(kept)


@pytest.mark.parametrize("kind", ["llama", "mlp"])
@pytest.mark.parametrize("text", PLANS)
def test_the_price_is_what_a_rank_keeps(text: str, kind: str) -> None:
    plan = Plan.parse(text)
    told = recipe(kind)
    seen = lasting(told.model_copy(update={"ema": EmaConfig()}), kind, plan) - lasting(told, kind, plan)
    where, sizes = cluster("laptop"), model(kind)
    asks = [PlanRequest(replace(sizes, averages=n), plan, where, stack(where.stack), 1, 24) for n in (0, 1)]
    without, with_ = (verdict(ask).memory for ask in asks)
    assert with_.optim - without.optim == pytest.approx(seen, rel=0.02)
    assert with_.params == without.params and with_.grads == without.grads
