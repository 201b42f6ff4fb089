"""What is computed again changes no bit of a run, whatever is spread beside it; and how much of it a plan names."""

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import World
from tests.train.small import recipe, started
from unisono.config import ModelConfig, Recipe
from unisono.plan import Plan
from unisono.plan.blocks import Again, again_of
from unisono.train.step.train_step import train

CASES = [
    ("", 1),
    ("pp=2 schedule=zb1p micros=4", 2),
    ("pp=2 schedule=1f1b micros=4", 2),
    ("dp=2 tp=2", 4),
    ("shard=2 zero=3", 2),
    ("dp=2 sync=canonical", 2),
]


def weights(ctx: Any, told: Any, plan: str) -> list[float]:
    run, feed, _ = started(ctx, told, plan)
    losses = [report.loss for report in train(run, feed, 3)]
    return losses + [slot.master.double().sum().item() for slot in run.local.slots]


@pytest.mark.parametrize("mode", ["selective", "full", "auto:full=1,selective=1"])
@pytest.mark.parametrize(("plan", "ranks"), CASES)
def test_the_same_bits_as_without(threads: World, tmp_path: Path, plan: str, ranks: int, mode: str) -> None:
    told = recipe(tmp_path, micro_batch=None)
    without, again = (
        threads(weights, ranks, group=ranks > 1, told=told, plan=f"{plan} recompute={how}")
        for how in ("none", mode)
    )
    assert without == again


def halves(ctx: Any, told: Any, plan: str) -> bool:
    run, _, _ = started(ctx, told, plan)
    return run.local.halves


def test_attention_alone_may_be_computed_again_where_weights_come_later(
    threads: World, tmp_path: Path
) -> None:
    """Whole blocks may not: the second half of their backward would compute them a third time."""
    told = recipe(tmp_path, micro_batch=None)
    assert threads(halves, 2, told=told, plan="pp=2 schedule=zb1p recompute=selective micros=2") == [
        True,
        True,
    ]
    assert threads(halves, 2, told=told, plan="pp=2 schedule=zb1p recompute=full micros=2") == [False, False]


def test_a_plan_says_how_many_blocks() -> None:
    assert again_of(Plan(), 4) == Again()
    assert again_of(Plan(recompute="full"), 4) == Again(4, 0)
    assert again_of(Plan(recompute="selective"), 4) == Again(0, 4)
    assert again_of(Plan(recompute="auto:full=3,selective=5"), 4) == Again(3, 1)


def test_what_a_model_does_not_name_is_refused() -> None:
    for kind in ("convnet", "mlp"):
        (problem,) = Plan.parse("recompute=selective").check(Recipe(model=ModelConfig(kind=kind)))
        assert problem.code == "P17"
        assert "recompute=full" in problem.fix
