"""Requests from a recipe: its model on a cluster under a plan. Imports no torch."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from types import SimpleNamespace
from typing import Any

from unisono.config import Loaded
from unisono.config.models import Recipe
from unisono.config.resolve import located, on_any_ranks
from unisono.plan import Plan
from unisono.plan.checks import Batch, Devices, batch_of
from unisono.plan.grammar import known
from unisono.planner import simulate
from unisono.planner.clusters import cluster
from unisono.planner.error_bars import HALF
from unisono.planner.machines.cluster import Cluster
from unisono.planner.model_kinds import Model, attending, kind
from unisono.planner.predict import roomy
from unisono.planner.stack import Stack, stack
from unisono.planner.studies import orders
from unisono.planner.timetables import chunks, serves
from unisono.programs.schedules import SCHEDULES
from unisono.spec.errors import ConfigProblems, Problem, UsageError
from unisono.spec.model import kind_of
from unisono.spec.words import count

_CHINCHILLA, _LENGTH = 20, "training for"


def request_of(
    loaded: Loaded, model: Model, cluster_name: str, software: Stack | None = None, order: str | None = None
) -> simulate.PlanRequest:
    """Return the request of a recipe. order: of the axes, as `--order` has it.

    Techniques that this version cannot play yet may be priced. Raises UsageError, and ConfigProblems with all that is
    wrong with the plan.
    """
    where = serving(cluster(cluster_name), loaded.recipe)
    if where.cores and loaded.plan.dp != -1:  # ranks of a host may be more than its cores
        where = roomy(where, loaded.plan.world)
    software = software or stack(where.stack)
    keys, assumed = assuming(loaded, loaded.plan, (where,))
    plan, batch = planned(replace(loaded, plan=keys), where, model)
    steps, more = length(loaded, model, where, batch.global_batch)
    if loaded.origins.get("plan", "default") == "default":
        more = (f"plan {plan}, as nobody named one (unisono plan finds the best)", *more)
    assumed, later = (*assumed, *more), unplayed(loaded)
    sizes = batch.micro_batch, batch.micros, steps
    by_sample = any(section.by_sample for section in loaded.recipe.sections())
    ask = simulate.PlanRequest(
        model, plan, where, software, *sizes, assumed=assumed, unplayed=later, by_sample=by_sample
    )
    order = order if order is not None else loaded.recipe.launch.order or None
    return ask if order is None else orders.under(ask, orders.read(order))


def serving(where: Cluster, recipe: Recipe) -> Cluster:
    """Return the cluster with as many parameter servers as the recipe says."""
    return replace(where, servers=recipe.launch.servers or 1)


def assuming(loaded: Loaded, plan: Plan, pools: Sequence[Cluster]) -> tuple[Plan, tuple[str, ...]]:
    """Return (the plan in the precision in which it is priced, choices that nobody named, in words).

    On accelerators the default is their mixed precision, on CPUs what `train` computes in. The recipe's own plan may
    name another.
    """
    assumed: list[str] = []
    recipe_plan = loaded.plan
    if "precision" not in plan.said and ("precision" in recipe_plan.said or recipe_plan.precision != "fp32"):
        plan = in_precision(plan, recipe_plan.precision)
    devices = [pool.device for pool in pools if not pool.cores]
    if "precision" not in plan.said and plan.precision == "fp32":
        if loaded.recipe.train.dtype == "float64":
            plan = in_precision(plan, "fp64")
        elif devices and all(device.name != "cpu" for device in devices):
            names = " and ".join(device.name for device in devices)
            mixed = [
                half
                for half in HALF
                if half in known("precision")
                and all(half in d.peak for d in devices)
                and not _refused(loaded.recipe, in_precision(plan, half))
            ]
            plan = in_precision(plan, (*mixed, "fp32")[0])
            why = (
                f"{names} has it"
                if mixed
                else f"this recipe cannot be trained in a half precision of {names}"
            )
            assumed.append(f"precision={plan.precision}, as nobody named one and {why}")
    train = loaded.recipe.train
    derived = train.micro_batch is not None and plan.micros is not None
    if loaded.origins.get("train.global_batch") == "default" and not derived:
        assumed.append(f"global_batch={train.global_batch}, the default, as nobody named one")
    return plan, tuple(assumed)


def _refused(recipe: Recipe, plan: Plan) -> bool:
    """Whether a section of the recipe refuses the plan's precision."""
    problems = (problem for section in recipe.sections() for problem in section.problems(recipe, plan))
    return any(problem.where.startswith("plan.precision") for problem in problems)


def length(loaded: Loaded, model: Model, where: Cluster, batch: int) -> tuple[int, tuple[str, ...]]:
    """Return (steps of the run, choices that nobody named). On accelerators, where the recipe names no steps, they
    take 20 tokens a parameter (Hoffmann et al., 2022)."""
    steps, transformer = loaded.recipe.train.steps, attending(model)
    small = where.cores > 0 or where.device.name == "cpu"
    if transformer is None or small or loaded.origins.get("train.steps") != "default":
        return steps, ()
    tokens = _CHINCHILLA * transformer.workload.active
    said = f"{_LENGTH} {count(tokens)} tokens, {_CHINCHILLA} a parameter (Hoffmann et al.), as nobody named --tokens"
    return ceil(tokens / (batch * transformer.context)), (said,)


def of_tokens(request: Any, tokens: float | None) -> Any:
    """Return a request, or a space, of as many steps as so many tokens take; unchanged where tokens is None."""
    if tokens is None:
        return request
    steps = ceil(tokens / (request.batch * request.model.context))
    return replace(
        request, steps=steps, assumed=tuple(said for said in request.assumed if not said.startswith(_LENGTH))
    )


def in_precision(plan: Plan, name: str) -> Plan:
    """Return the plan with a precision that counts as named."""
    return replace(plan, precision=name, said=plan.said | {"precision"})


def unplayed(loaded: Loaded) -> tuple[str, ...]:
    """Return what `train` cannot play of a recipe, in words."""
    model = loaded.recipe.model
    return () if model.played else (f"model.kind={model.kind}",)


def planned(loaded: Loaded, where: Devices, model: Model) -> tuple[Plan, Batch]:
    """Return the plan on all devices, and its batch. Raises UsageError, and ConfigProblems with all that is wrong
    with it."""
    recipe = on_any_ranks(loaded.recipe)
    plan = loaded.plan.fill(where.devices)
    wrong = [*plan.check(judged(recipe, model), where), *kind(model).problems(model, plan)]
    if wrong:
        each = (_of_world(p, plan, where.devices) for p in wrong)
        raise ConfigProblems([replace(p, where=located(p.where, loaded.origins)) for p in each])
    batch, unfit = batch_of(plan, recipe.train)
    if batch is None:
        raise ConfigProblems([unfit] if unfit else [])
    if plan.pp > 1 and not serves(plan.schedule, plan.pp, batch.micros, model.n_layer):
        raise _not_served(plan.schedule, plan.pp, batch.micros, model.n_layer)
    return plan, batch


def _of_world(problem: Problem, plan: Plan, devices: int) -> Problem:
    """A problem of the batch as one of the devices, where the plan does not take all of these."""
    if problem.code != "P11" or plan.world == devices:
        return problem
    spread = (
        f"dp={devices // plan.inner}" if devices % plan.inner == 0 else f"axes whose product is {devices}"
    )
    what = f"{plan} takes {plan.world} of {devices} devices, and {problem.what}"
    return replace(problem, what=what, fix=f"{spread}, which takes all of them; or {problem.fix}")


def judged(recipe: Recipe, model: Model) -> Any:
    """Return the recipe as `Plan.check` reads it, with the sizes of a model that is described elsewhere."""
    transformer = attending(model)
    if not recipe.model.kind.startswith("hf:") or transformer is None:
        return recipe
    sizes = kind_of("moe" if transformer.experts else "gpt").model_construct(
        n_head=transformer.n_head, n_kv_head=transformer.kv_heads, d_ff=transformer.d_ff, context=transformer.context,
        n_experts=transformer.experts.count if transformer.experts else 0,
    )  # fmt: skip
    read = SimpleNamespace(
        kind=sizes.kind, depth=transformer.n_layer, depth_key="model.kind", deals=sizes.deals
    )
    return recipe.model_copy(update={"model": read})  # which is read, and not validated


def _not_served(schedule: str, ranks: int, micros: int, n_layer: int) -> UsageError:
    """Return why there is no such timetable: its own reason, or too few blocks for its stages."""
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
