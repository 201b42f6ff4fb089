"""The demo is a recipe like any other: without a problem, for four ranks, and over what every Python has."""

from unisono.config import resolve
from unisono.recipes.demo import demo


def test_it_resolves_and_needs_four_ranks() -> None:
    recipe, plan = demo()
    resolved = resolve(recipe, plan)
    assert resolved.plan.world == 4 and not plan.check(recipe)
    assert recipe.data.source == "stdlib"
    batch = resolved.batch
    assert batch.micros * batch.micro_batch * plan.dp * plan.shard == recipe.train.global_batch
