"""`unisono simulate`: what a plan costs on a cluster that one need not have. Without torch, data or files."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unisono.config import Loaded
from unisono.config.resolve import located, on_any_ranks
from unisono.plan.checks import batch_of
from unisono.planner import simulate
from unisono.planner.clusters import cluster
from unisono.planner.stack import stack
from unisono.spec.errors import ConfigProblems, UsageError
from unisono.spec.transformer import Transformer, transformer

_NOT_BUILT = "P10"


def question(got: Loaded, cluster_name: str, stack_name: str | None) -> simulate.Question:
    """What is asked. Raises UsageError, ConfigProblems with all that is wrong with the plan.

    Techniques that this version cannot play yet may be priced.
    """
    where = cluster(cluster_name)
    made = stack(stack_name or where.stack)
    model = model_of(got)
    recipe = on_any_ranks(got.recipe)
    plan = got.plan.fill(where.devices)
    problems = [p for p in plan.check(recipe, where) if p.code != _NOT_BUILT]
    if problems:
        raise ConfigProblems([replace(p, where=located(p.where, got.origins)) for p in problems])
    batch, wrong = batch_of(plan, recipe.train)
    if batch is None:
        raise ConfigProblems([wrong] if wrong else [])
    return simulate.Question(model, plan, where, made, batch.micro_batch, batch.micros, recipe.train.steps)


def run(ask: simulate.Question, given: Any) -> tuple[Mapping[str, Any], str]:
    """(the object of --json, the page). given: the flags of `cli_studies`. Raises DoesNotFit."""
    from unisono.commands import studies

    ask = studies.asked(ask, given)
    answer = simulate.simulate(ask)
    simulate.demand(answer)
    keys, text = studies.extras(ask, given)
    return {**simulate.as_json(answer), **keys}, f"{simulate.as_text(answer)}\n\n{text}"


def model_of(got: Loaded) -> Transformer:
    """The model's sizes. Raises UsageError for what cannot be priced."""
    sizes = got.recipe.model
    if sizes.kind != "gpt":
        raise UsageError(
            f"model.kind {sizes.kind}: only gpt can be priced in this version",
            where=located("model.kind", got.origins),
            fix="--model.kind gpt",
            code="C22",
        )
    if sizes.d_model % sizes.n_head:
        raise UsageError(
            f"d_model {sizes.d_model} is no multiple of n_head {sizes.n_head}",
            where=located("model.d_model, model.n_head", got.origins),
            fix=f"--model.d_model {sizes.n_head * max(1, round(sizes.d_model / sizes.n_head))}",
            code="C22",
        )
    vocab = sizes.vocab
    if vocab is None and got.recipe.data.tokenizer == "byte":
        vocab = 256  # every byte is a token
    if vocab is None:
        raise UsageError(
            f"the vocabulary of tokenizer {got.recipe.data.tokenizer} is not known without the data",
            where=located("model.vocab", got.origins),
            fix="--model.vocab 51200",
            code="C22",
        )
    return transformer(sizes, vocab)
