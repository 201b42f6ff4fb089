"""A pipeline without a flush is priced at what a further step takes, with the weights that it stashes."""

import pytest

from tests.planner.published import gpt
from unisono.plan import Plan
from unisono.planner.clusters import cluster
from unisono.planner.pricing import price as priced
from unisono.planner.pricing import verdict
from unisono.planner.replicas import fidelity
from unisono.planner.request import PlanRequest
from unisono.planner.stack import stack
from unisono.spec.fidelity import Fidelity


def asked(schedule: str, micros: int = 8) -> PlanRequest:
    where = cluster("dgx-a100:1")
    plan = Plan.parse(f"pp=4 schedule={schedule} precision=bf16")
    return PlanRequest(gpt(16, 16, 1024, 1024), plan, where, stack("megatron-2022"), 1, micros)


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream:buffers=2"])
def test_the_bubble_is_gone_and_the_weights_are_there_more_often(schedule: str) -> None:
    flow, flush = (priced(asked(name)) for name in (schedule, "1f1b"))
    # What is left: rows of unequal work, of which the dearest sets the pace.
    assert flow.step < flush.step and flow.idle < 0.05 * flush.idle
    less, more = (verdict(asked(name)).memory for name in ("1f1b", schedule))
    assert more.params == pytest.approx(3 * less.params)
    assert (more.grads, more.optim, more.activations) == (less.grads, less.optim, less.activations)


def test_its_price_says_what_it_loses() -> None:
    found, why = fidelity(asked("pipedream").plan)
    assert found is Fidelity.LOSSY and "a backward uses its forward's weights" in why
