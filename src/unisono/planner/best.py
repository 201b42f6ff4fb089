"""The best plans for a cluster, and why; where none fits, what would. Without torch, data or files."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from unisono.plan import Plan
from unisono.planner import explanation, search
from unisono.planner.clusters import of_size
from unisono.planner.formatting import room
from unisono.planner.machines.cluster import Cluster
from unisono.planner.remedies import AWAY
from unisono.planner.simulate import PlanResult
from unisono.planner.space import meshes
from unisono.planner.studies import orders
from unisono.planner.toml_tables import is_file
from unisono.spec.errors import Infeasible, UsageError
from unisono.spec.words import nbytes, seconds

_LOOKED = 4  # best plans that are looked at in other orders of their axes


def run(
    within: search.Space, cluster_name: str, top: int, objective: str, fewer: bool = False
) -> tuple[Mapping[str, Any], str]:
    """(the object of --json, the page). Raises Infeasible with the smallest cluster that would do."""
    ranking = search.search(within, top, objective)
    if not ranking.best:
        raise _nothing(within, ranking, cluster_name)
    if fewer:
        ranking = search.on_fewer(within, ranking, objective)
    few = ranking.best[: _LOOKED if objective == "time" else 1]
    ordered, said = orders.describe_best(few)
    facts, page = explanation.describe(ranking, *filter(None, (said, _alone(within, ranking.best[0]))))
    return {**facts, **ordered}, page


def _alone(within: search.Space, best: PlanResult) -> str:
    """A line where one device alone is as quick as the best plan of all: small models on many devices mostly wait."""
    single = replace(within, cluster=replace(within.cluster, devices=1))
    answers = search.search(single, 1).best if best.request.plan.world > 1 else ()
    if not answers or answers[0].price.step > best.price.step:
        return ""
    took = seconds(answers[0].price.step)
    return f"one device alone would be quicker: {took} a step under {answers[0].request.plan}"


def _nothing(within: search.Space, ranking: search.Ranking, cluster_name: str) -> Infeasible:
    where = f"{ranking.searched} plans on {within.cluster.name}"
    if ranking.nearest is None:
        return _undealt(within, cluster_name)
    larger = _larger(within, cluster_name)
    fix = "more devices, or a smaller --train.micro_batch"
    if larger is not None:
        named = f"--cluster {larger[0].name}"
        if is_file(cluster_name):
            named = f"nodes = {larger[0].devices // larger[0].node} in {cluster_name}"
        fix = f"{named}, where {larger[1].request.plan} fits: {larger[1].price.step:.4g} s a step"
    if (away := _put_away(within)) is not None:
        fix = f'{fix}; or --plan "{away.request.plan}", on as many devices: {seconds(away.price.step)} a step'
    short = ranking.nearest.verdict
    return Infeasible(
        f"no plan fits: the nearest, {ranking.nearest.request.plan}, needs {nbytes(short.memory.total)} and"
        f" {within.cluster.device.name} has {room(short)}",
        where=where,
        fix=fix,
    )


def _put_away(within: search.Space) -> PlanResult | None:
    """Return the fastest plan on these devices that fits by offloading as little as possible, of plans without a
    pipeline whose weights are sharded. None where none fits, or where the speed of such copies is unknown."""
    keys: dict[str, Any] = {"recompute": "full", "pp": 1, "cp": 1, "zero": 3}
    free = {key: value for key, value in keys.items() if key not in within.held.said}
    for what in AWAY if within.held.offload == "none" else ():
        held = replace(within.held, **free, offload=what)
        held = replace(held, said=within.held.said | {*free, "offload"})
        with suppress(UsageError):
            if answers := search.search(replace(within, held=held), 1).best:
                return answers[0]
    return None


def _undealt(within: search.Space, name: str) -> Infeasible:
    """Why there is no plan at all: a key that is held, or more devices than the batch and the model have work for."""
    said = sorted(within.held.said - {"precision"})
    what = (
        f"a batch of {within.batch} and {within.model.n_layer} layers to {within.cluster.devices:,} devices"
    )
    fixes: list[str] = []
    for key in said:
        freed = replace(within.held, **{key: getattr(Plan(), key)}, said=within.held.said - {key})
        if _deals(replace(within, held=freed)):
            fixes.append(f"--plan without {key}={getattr(within.held, key)}")
    if said:
        what = f"{what} with {' '.join(f'{key}={getattr(within.held, key)}' for key in said)}"
    nodes = within.cluster.devices // within.cluster.node
    while not fixes and nodes > 1:
        nodes //= 2
        smaller = of_size(name, nodes * within.cluster.node)
        if _deals(replace(within, cluster=smaller)):
            fixes.append(f"nodes = {nodes} in {name}" if is_file(name) else f"--cluster {smaller.name}")
    if _deals(replace(within, batch=within.cluster.devices, micro_batch=None, legal=lambda plan: True)):
        fixes.append(f"--train.global_batch {within.cluster.devices}")
    return Infeasible(
        f"no plan splits {what}",
        where=f"0 plans on {within.cluster.name}",
        fix=", or ".join(fixes) or "another --train.global_batch, fewer devices, or hold less with --plan",
    )


def _deals(within: search.Space) -> bool:
    """Whether there is any plan."""
    return next(meshes(within), None) is not None


def _larger(within: search.Space, name: str) -> tuple[Cluster, PlanResult] | None:
    """The smallest cluster of this kind on which something would fit, and its best plan."""
    if within.cluster.cores:
        return None  # what was measured of one machine says little of many
    try:
        node = of_size(name, within.cluster.devices).node
        return search.smallest(within, lambda nodes: of_size(name, nodes * node))
    except UsageError:  # a file whose links end where its own nodes do
        return None
