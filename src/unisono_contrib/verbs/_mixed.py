"""`unisono simulate` and `unisono plan` on a mixture of devices. No data, no torch."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unisono.config import Loaded
from unisono.plan import Plan
from unisono.planner import search
from unisono.planner.clusters import cluster, names
from unisono.planner.formatting import Description, room
from unisono.planner.from_recipe import assuming, planned, serving, unplayed
from unisono.planner.model_kinds import Model, attending
from unisono.planner.simulate import PlanRequest, PlanResult
from unisono.planner.space import Space, space_on
from unisono.planner.stack import Stack, stack
from unisono.planner.timetables import copies
from unisono.spec.errors import Infeasible, UsageError
from unisono.spec.words import nbytes, seconds
from unisono.verbs._sizes import model_of
from unisono_contrib.planner.demand import demand
from unisono_contrib.planner.mixture import Mixture, mixture, placements
from unisono_contrib.planner.page import facts_of, page_of
from unisono_contrib.planner.studies import mixtures
from unisono_contrib.verbs._studies import with_flags

# Flags that ask for what is priced on equal devices alone.
_SIMULATE = (
    "mtbf", "stragglers", "sweep", "batches", "noise_scale", "order", "out", "trace", "loader_samples_s",
    "loader_gb_s", "sample_kb",
)  # fmt: skip
_PLAN = ("check", "all_keys", "fewer")


def _refuse(values: Any, flags: tuple[str, ...], where: Mixture) -> None:
    if wrong := [f"--{flag.replace('_', '-')}" for flag in flags if getattr(values, flag)]:
        what = f"{' '.join(wrong)}: on a mixture of devices, nothing but a step is priced"
        fix = f"the same with --cluster {where.pools[0].name}"
        raise UsageError(what, where="--cluster", fix=fix, code="C04")


def _mixture(loaded: Loaded, flags: Any) -> Mixture:
    where = mixture(flags.cluster)
    return replace(where, pools=tuple(serving(pool, loaded.recipe) for pool in where.pools))


def priced(loaded: Loaded, environ: Mapping[str, str], flags: Any) -> tuple[Mixture, PlanRequest]:
    """What `simulate` is asked. Raises UsageError, ConfigProblems with all that is wrong with the plan."""
    where = _mixture(loaded, flags)
    _refuse(flags, _SIMULATE, where)
    if flags.cost_per_hour is not None:
        pools = tuple(replace(pool, cost_per_hour=flags.cost_per_hour) for pool in where.pools)
        where = replace(where, pools=pools)
    return where, with_flags(request_on_mixture(loaded, model_of(loaded, environ), where, flags.stack), flags)


def request_on_mixture(loaded: Loaded, model: Model, mixture: Mixture, software: Stack | None) -> PlanRequest:
    """The same on devices of several kinds; the cluster is that of all as if they were one. Raises as above."""
    if attending(model) is None:
        raise UsageError("on a mixture of devices, transformers can be priced", where="model.kind",
                         fix=f"--cluster {mixture.pools[0].name}, one of its pools", code="C22")  # fmt: skip
    keys, assumed = assuming(loaded, loaded.plan, mixture.pools)
    plan, batch = planned(replace(loaded, plan=keys), mixture, model)
    unpriced(plan)
    software, steps = software or stack(mixture.stack), loaded.recipe.train.steps
    sizes, later = (batch.micro_batch, batch.micros, steps), unplayed(loaded)
    return PlanRequest(model, plan, mixture.whole(), software, *sizes, assumed=assumed, unplayed=later)


def unpriced(plan: Plan) -> None:
    """Raises UsageError for a timetable whose two ways would lie on unlike devices."""
    if copies(plan.schedule) > 1:
        raise UsageError(f"schedule={plan.schedule} cannot be priced on a mixture of devices", where="plan.schedule",
                         fix="dualpipev or 1f1b", code="C22")  # fmt: skip


def simulated(where: Mixture, ask: PlanRequest) -> Description:
    """(the object of --json, the page). Raises DoesNotFit where no placement fits."""
    placed = mixtures.everywhere(where, ask)

    def elsewhere(other: PlanRequest) -> PlanResult | None:
        return mixtures.everywhere(where, other)[0].answer if any(placements(where, other.plan)) else None

    demand(placed[0].answer, priced=elsewhere)
    keys, text = mixtures.describe(placed)
    return {**facts_of(placed[0].answer), **keys}, f"{page_of(placed[0].answer)}\n\n{text}"


def searched(loaded: Loaded, environ: Mapping[str, str], flags: Any) -> tuple[Mixture, Space]:
    """What `plan` searches. Raises UsageError."""
    where = _mixture(loaded, flags)
    _refuse(flags, _PLAN, where)
    if flags.objective != "time":
        what = "on a mixture of devices, plans are ranked by time"
        raise UsageError(what, where="--objective", fix="--objective time", code="C04")
    held = Plan.parse(flags.plan, where="flag --plan") if flags.plan else Plan()
    unpriced(held)
    held, assumed = assuming(loaded, held, where.pools)
    software = flags.stack or stack(where.stack)
    space = space_on(loaded, model_of(loaded, environ), held, where.pools[0], software)
    return where, replace(space, assumed=assumed)


def planned_on(where: Mixture, space: Space, top: int) -> Description:
    """(the object of --json, the page). Raises Infeasible where no plan fits, over all pools or on one alone."""
    ranking = mixtures.find(space, where, top)
    if not ranking.placed and all(answer is None for _, answer in ranking.alone):
        raise _nothing(where, space, ranking)
    return mixtures.describe_best(ranking)


def _nothing(where: Mixture, space: Space, ranking: mixtures.MixedRanking) -> Infeasible:
    """Why nothing fits, and the smallest cluster of one of its kinds on which something would."""
    where_text, fixes = f"{ranking.ranking.searched} plans on {where.name}", list[tuple[float, str]]()
    for name in (pool.name.partition(":")[0] for pool in where.pools):
        at = replace(space, cluster=cluster(name)) if name in names() else None
        larger = (
            search.smallest(at, lambda nodes, name=name: cluster(f"{name}:{nodes}"))
            if at is not None
            else None
        )
        if larger is not None:
            on, best = larger
            text = f"--cluster {on.name}, where {best.request.plan} fits: {seconds(best.price.step)} a step"
            fixes.append((on.devices, text))
    fix = min(fixes)[1] if fixes else "more devices, or a smaller --train.micro_batch"
    if ranking.nearest is None:
        what = f"no plan splits a batch of {space.batch} and {space.model.n_layer} layers over these pools"
        return Infeasible(what, where=where_text, fix=fix)
    short = ranking.nearest.answer.verdict
    what = f"the nearest, {ranking.nearest.answer.request.plan}, needs {nbytes(short.memory.total)} on a rank"
    return Infeasible(f"no plan fits: {what} that has {room(short)}", where=where_text, fix=fix)
