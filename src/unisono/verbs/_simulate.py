"""`unisono simulate`: what a plan costs on a cluster that one need not have. No data, and no torch but for models that
have to be traced."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unisono.config import Loaded
from unisono.config.resolve import located, on_any_ranks
from unisono.plan import Plan
from unisono.plan.checks import Batch, batch_of
from unisono.planner import orders, orders_told, pieces, recut, simulate
from unisono.planner.clusters import cluster
from unisono.planner.machines.cluster import Cluster
from unisono.planner.machines.mixture import Mixture
from unisono.planner.priced import Model
from unisono.planner.stack import stack
from unisono.planner.timetables import chunks, serves
from unisono.planner.work.transformer import Transformer
from unisono.programs.schedules import SCHEDULES
from unisono.spec.errors import ConfigProblems, UsageError
from unisono.verbs._sizes import judged, model_of, problems

NOT_BUILT = "P10"


def question(
    got: Loaded, cluster_name: str, stack_name: str | None, order: str | None = None
) -> simulate.Question:
    """What is asked. order: of the axes, as `--order` has it. Raises UsageError, ConfigProblems with all that is wrong
    with the plan.

    Techniques that this version cannot play yet may be priced.
    """
    where = cluster(cluster_name)
    made = stack(stack_name or where.stack)
    model = model_of(got, os.environ)
    plan, batch = planned(got, where, model)
    if plan.offload != "none" and not (where.device.host and isinstance(model, Transformer)):
        raise _not_offloaded(plan.offload, where.device.name, isinstance(model, Transformer))
    ask = simulate.Question(model, plan, where, made, batch.micro_batch, batch.micros, got.recipe.train.steps)
    return ask if order is None else orders.under(ask, orders.read(order))


def planned(got: Loaded, where: Cluster | Mixture, model: Model) -> tuple[Plan, Batch]:
    """The plan on all devices, and its batch. Raises UsageError, ConfigProblems with all that is wrong with it."""
    recipe = on_any_ranks(got.recipe)
    plan = got.plan.fill(where.devices)
    wrong = [p for p in plan.check(judged(recipe, model), where) if p.code != NOT_BUILT]
    wrong += problems(model, plan)
    if wrong:
        raise ConfigProblems([replace(p, where=located(p.where, got.origins)) for p in wrong])
    batch, unfit = batch_of(plan, recipe.train)
    if batch is None:
        raise ConfigProblems([unfit] if unfit else [])
    if plan.pp > 1 and not serves(plan.schedule, plan.pp, batch.micros, model.n_layer):
        raise _not_served(plan.schedule, plan.pp, batch.micros, model.n_layer)
    return plan, batch


def run(ask: simulate.Question, given: Any) -> tuple[Mapping[str, Any], str]:
    """(the object of --json, the page). given: the flags of `cli_studies`, and out and trace: see `pictures`.

    Raises DoesNotFit, UsageError, OSError.
    """
    from unisono.verbs import _studies as studies

    ask = studies.asked(ask, given)
    every = orders.compared(ask) if given.order == orders.BEST else None
    answer = simulate.simulate(ask) if every is None else every.best
    better = recut.better(answer)
    simulate.demand(answer, recut.sentence(better, fits=False) if better is not None else "")
    keys, text = studies.extras(answer, given)
    facts = {
        **simulate.as_json(answer),
        **orders_told.as_json(answer, every),
        **recut.as_json(better),
        **pieces.as_json(answer),
        **keys,
    }
    lies = "" if given.order is None else f"\n\n{orders_told.as_text(answer, every)}"
    cut = f"\n\ncut        {recut.sentence(better, fits=True)}" if better is not None else ""
    parts = f"\n\n{pieces.as_text(answer)}" if given.blocks else ""
    page = f"{simulate.as_text(answer)}{parts}{lies}{cut}\n\n{text}"
    if given.out is None and given.trace is None:
        return facts, page
    from unisono.verbs._pictures import pictures

    written = pictures(answer, facts, given.out, given.trace)
    return {**facts, "written": written}, "\n".join([page, "", *(f"written    {path}" for path in written)])


def _not_served(schedule: str, ranks: int, micros: int, n_layer: int) -> UsageError:
    """Why there is no such timetable: as it says itself, or since the model has too few blocks for its stages."""
    if ranks * chunks(schedule) <= n_layer:
        try:
            SCHEDULES.read(schedule).timetable(ranks, micros)
        except UsageError as refused:
            return refused
    return UsageError(
        f"schedule={schedule} cuts {n_layer} blocks into {ranks * chunks(schedule)} stages",
        where="plan.schedule, plan.pp, model.n_layer",
        fix="fewer stages, or schedule=1f1b",
        code="P13",
    )


def _not_offloaded(what: str, device: str, blocks: bool) -> UsageError:
    reason = f"it is not known how fast {device} reaches its host's memory"
    fix = "host_gb_s in the device of a cluster file, or offload=none"
    if not blocks:
        reason, fix = "of a network of parts it cannot be priced", "offload=none"
    return UsageError(f"offload={what}: {reason}", where="plan.offload", fix=fix, code="C22")
