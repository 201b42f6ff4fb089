"""`unisono simulate`: what a plan costs on a cluster that one need not have. No data, and no torch but for models that
have to be traced."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unisono.commands.sizes import judged, model_of, problems
from unisono.config import Loaded
from unisono.config.resolve import located, on_any_ranks
from unisono.plan.checks import batch_of
from unisono.planner import simulate
from unisono.planner.clusters import cluster
from unisono.planner.stack import stack
from unisono.spec.errors import ConfigProblems

_NOT_BUILT = "P10"


def question(got: Loaded, cluster_name: str, stack_name: str | None) -> simulate.Question:
    """What is asked. Raises UsageError, ConfigProblems with all that is wrong with the plan.

    Techniques that this version cannot play yet may be priced.
    """
    where = cluster(cluster_name)
    made = stack(stack_name or where.stack)
    model = model_of(got, os.environ)
    recipe = on_any_ranks(got.recipe)
    plan = got.plan.fill(where.devices)
    wrong = [p for p in plan.check(judged(recipe, model), where) if p.code != _NOT_BUILT]
    wrong += problems(model, plan)
    if wrong:
        raise ConfigProblems([replace(p, where=located(p.where, got.origins)) for p in wrong])
    batch, unfit = batch_of(plan, recipe.train)
    if batch is None:
        raise ConfigProblems([unfit] if unfit else [])
    return simulate.Question(model, plan, where, made, batch.micro_batch, batch.micros, recipe.train.steps)


def run(ask: simulate.Question) -> tuple[Mapping[str, Any], str]:
    """(the object of --json, the page). Raises DoesNotFit."""
    answer = simulate.simulate(ask)
    simulate.demand(answer)
    return simulate.as_json(answer), simulate.as_text(answer)
