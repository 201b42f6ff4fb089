"""`unisono simulate` and `unisono plan` on a mixture of devices. No data, no torch."""

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import Any

from unisono.codecs import CODECS
from unisono.config import Loaded
from unisono.plan import Plan
from unisono.planner import mixed, mixed_chosen, mixed_search, mixed_told, search
from unisono.planner.asked import planned
from unisono.planner.clusters import cluster, names
from unisono.planner.machines.mixture import Mixture
from unisono.planner.pools import mixture
from unisono.planner.simulate import GIB, gib
from unisono.planner.space import Space, space_on
from unisono.planner.stack import stack
from unisono.planner.work.transformer import Transformer
from unisono.spec.errors import Infeasible, UsageError
from unisono.spec.family import Family, split
from unisono.spec.fidelity import Fidelity
from unisono.sync import POLICIES
from unisono.verbs._sizes import model_of

# Flags that ask for what is priced on equal devices alone.
_EQUAL = (
    "mtbf",
    "stragglers",
    "servers",
    "sweep",
    "batches",
    "noise_scale",
    "order",
    "out",
    "trace",
    "loader_samples_s",
    "loader_gb_s",
    "sample_kb",
    "blocks",
)


def question(got: Loaded, environ: Mapping[str, str], given: Any) -> mixed.MixedQuestion:
    """What is asked. Raises UsageError, ConfigProblems with all that is wrong with the plan."""
    where = mixture(given.cluster)
    asked = [flag for flag in _EQUAL if getattr(given, flag)]
    if asked:
        flags = " ".join(f"--{flag.replace('_', '-')}" for flag in asked)
        raise UsageError(f"{flags}: on a mixture of devices, nothing but a step is priced", where="unisono simulate",
                         fix=f"the same with --cluster {where.pools[0].name}", code="C04")  # fmt: skip
    if given.cost_per_hour is not None:
        pools = tuple(replace(pool, cost_per_hour=given.cost_per_hour) for pool in where.pools)
        where = replace(where, pools=pools)
    model = transformer_of(got, environ, where)
    plan, batch = planned(got, where, model)
    priceable(plan, where)
    steps = got.recipe.train.steps
    if given.tokens is not None:
        steps = ceil(given.tokens / (batch.global_batch * model.context))
    made = stack(given.stack or where.stack)
    return mixed.MixedQuestion(model, plan, where, made, batch.micro_batch, batch.micros, steps)


def transformer_of(got: Loaded, environ: Mapping[str, str], where: Mixture) -> Transformer:
    """The recipe's model. Raises UsageError for what is dealt to equal devices alone."""
    model = model_of(got, environ)
    if not isinstance(model, Transformer):
        raise UsageError("on a mixture of devices, transformers can be priced", where="model.kind",
                         fix=f"--cluster {where.pools[0].name}, one of its pools", code="C22")  # fmt: skip
    return model


def priceable(plan: Any, where: Mixture) -> None:
    """Raises UsageError for values whose price is known on equal devices alone."""
    wrong = (
        ("schedule", "dualpipe", "its two ways would lie on unlike devices; dualpipev or 1f1b"),
        ("recompute", "auto", "none, selective or full"),
        *((("offload", plan.offload, "offload=none"),) if plan.offload != "none" else ()),
        *((("sync", plan.sync, "sync=every_step"),) if not _exact(POLICIES, plan.sync) else ()),
        *((("codec", plan.codec, "codec=plain"),) if not _exact(CODECS, plan.codec) else ()),
    )
    for key, value, fix in wrong:
        if getattr(plan, key) == value:
            raise UsageError(f"{key}={value} cannot be priced on a mixture of devices", where=f"plan.{key}", fix=fix,
                             code="C22")  # fmt: skip


def _exact(family: Family[Any], text: str) -> bool:
    """Whether it is a member of ours that gives one device's gradient, up to rounding."""
    name = split(text)[0]
    return name in family.names() and family.find(name).fidelity is not Fidelity.LOSSY


def simulate(ask: mixed.MixedQuestion) -> tuple[Mapping[str, Any], str]:
    """(the object of --json, the page). Raises Infeasible where no placement fits."""
    answers = mixed.simulate(ask)
    if not answers[0].fits:
        raise _does_not_fit(answers[0])
    found = mixed_told.told(answers)
    return mixed_told.as_json(found), mixed_told.as_text(found)


def _does_not_fit(answer: mixed.MixedAnswer) -> Infeasible:
    ask, (place, row) = answer.question, answer.tightest
    name = ask.mixture.pools[row.pool].device.name
    parts = sorted(gib(row.memory).items(), key=lambda part: -part[1])
    return Infeasible(
        f"row {place} of the pipeline needs {row.memory.total / GIB:.1f} GiB, {name} has {row.capacity / GIB:.1f} GiB:"
        f" short by {row.short / GIB:.1f} GiB",
        where=f"{ask.plan} on {ask.mixture.name}, {mixed_told.said(answer)}",
        likely="GiB: "
        + ", ".join(f"{part} {size:.1f}" for part, size in parts if part != "total" and size >= 0.05),
        fix=_remedy(ask),
    )


def _remedy(ask: mixed.MixedQuestion) -> str:
    """The change that fits and makes the step longest least."""
    best: tuple[float, str] | None = None
    for said, plan, micro_batch, micros in mixed.remedies(ask):
        other = replace(ask, plan=plan, micro_batch=micro_batch, micros=micros)
        first = mixed.simulate(other)[0]
        if first.fits and (best is None or first.price.step < best[0]):
            best = first.price.step, f"{said}: {first.price.step:.4g} s a step"
    return best[1] if best else "more devices, and with them a greater shard, tp or pp"


# --- plan ------------------------------------------------------------------------------------------------------------


def space(got: Loaded, environ: Mapping[str, str], given: Any) -> tuple[Space, Mixture]:
    """What is searched. Raises UsageError."""
    where = mixture(given.cluster)
    for flag, fix in (
        ("check", "--check with this machine alone"),
        ("all_keys", 'one at a time: --plan "schedule=zb1p", or one of its pools'),
        ("fewer", "fewer nodes in the name"),
    ):
        if getattr(given, flag):
            what = f"--{flag.replace('_', '-')} is not for a mixture of devices"
            raise UsageError(what, where="unisono plan", fix=fix, code="C04")
    if given.objective != "time":
        raise UsageError("on a mixture of devices, plans are ranked by time", where="--objective",
                         fix="--objective time", code="C04")  # fmt: skip
    model = transformer_of(got, environ, where)
    held = Plan.parse(given.plan, where="flag --plan") if given.plan else Plan()
    priceable(held, where)
    if "precision" not in held.said:
        held = replace(held, precision=got.plan.precision)
    return space_on(got, model, held, where.pools[0], stack(given.stack or where.stack)), where


def plan(base: Space, where: Mixture, top: int) -> tuple[Mapping[str, Any], str]:
    """(the object of --json, the page). Raises Infeasible where no plan fits, over all pools or on one alone."""
    found = mixed_search.find(base, where, top)
    if not found.best and all(one.best is None for one in found.alone):
        raise _nothing(base, where, found)
    return mixed_chosen.as_json(found), mixed_chosen.as_text(found)


def _nothing(base: Space, where: Mixture, found: mixed_search.MixedFound) -> Infeasible:
    """Why nothing fits, and the smallest cluster of one of its kinds on which something would."""
    told = f"{found.searched} plans on {where.name}"
    fixes: list[tuple[float, str]] = []
    for pool in where.pools:
        name = pool.name.partition(":")[0]
        if name not in names():
            continue
        larger = search.smallest(
            replace(base, cluster=pool), lambda nodes, name=name: cluster(f"{name}:{nodes}")
        )
        if larger is not None:
            on, best = larger
            text = f"--cluster {on.name}, where {best.question.plan} fits: {best.price.step:.4g} s a step"
            fixes.append((on.devices, text))
    fix = min(fixes)[1] if fixes else "more devices, or a smaller --train.micro_batch"
    if found.nearest is None:
        what = f"no plan deals a batch of {base.batch} and {base.model.n_layer} layers to these pools"
        return Infeasible(what, where=told, fix=fix)
    row = found.nearest.tightest[1]
    return Infeasible(
        f"no plan fits: the nearest, {found.nearest.question.plan}, needs {row.memory.total / GIB:.1f} GiB and"
        f" {where.pools[row.pool].device.name} has {row.capacity / GIB:.1f}",
        where=told,
        fix=fix,
    )
