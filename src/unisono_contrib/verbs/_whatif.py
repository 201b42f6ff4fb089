"""What the planner says of a run under other ranks, links and batches: its price beside that of the run as it is.

The planner's own error on this run, what was measured over what it says of the run as it is, goes onto each answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unisono import config
from unisono.config import Loaded
from unisono.plan.checks import batch_of
from unisono.planner import predict
from unisono.planner.from_recipe import serving
from unisono.planner.machines.cluster import Cluster
from unisono.planner.request import PlanRequest
from unisono.planner.simulate import simulate
from unisono.spec.errors import ConfigProblems, UnisonoError, UsageError
from unisono.spec.runs import CONFIG
from unisono.spec.words import count, nbytes, percent, seconds
from unisono.verbs._sizes import model_of

LINKS = (0.01, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0, 100.0)
_MOST = 1024  # ranks


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Other ranks, times the bandwidth of all links, another global batch in samples."""

    ranks: int
    link: float
    batch: int


def choices(folder: Path, environ: Mapping[str, str]) -> dict[str, Any] | None:
    """What the sliders may say: `ranks` (multiples of a replica's), `links`, `batches`, and where they stand `now`;
    None for a run that cannot be priced."""
    try:
        run = config.load(str(folder / CONFIG), [], environ=environ)
        _priced(run, WhatIf(run.plan.world, 1.0, _batch(run)), environ)
    except (UnisonoError, OSError):
        return None
    inner, now = run.plan.inner, _batch(run)
    ranks = {inner * 2**power for power in range(11)} | {run.plan.world}
    batches = {max(1, now * 2**power // 16) for power in range(11)} | {now}
    return {
        "ranks": sorted(n for n in ranks if n <= max(_MOST, run.plan.world)), "links": [*LINKS],
        "batches": sorted(batches), "now": {"ranks": run.plan.world, "link": 1.0, "batch": now},
    }  # fmt: skip


def answer(
    folder: Path, wanted: WhatIf, measured: float | None, environ: Mapping[str, str]
) -> dict[str, Any]:
    """The price in words. measured: seconds of this run's step, None where there is none. Raises UnisonoError."""
    run = config.load(str(folder / CONFIG), [], environ=environ)
    today, where = _priced(run, WhatIf(run.plan.world, 1.0, _batch(run)), environ)
    then, _ = _priced(_other(folder, run, wanted, environ), wanted, environ)
    off = measured / today.price.step if measured else 1.0
    step, before = then.price.step * off, today.price.step * off
    rate, rate_before = wanted.batch / step, _batch(run) / before
    times = rate / rate_before
    comm = sum(spent.exposed for spent in then.price.comm.values()) * off
    more = {
        "same": "as many samples a second as now",
        "more": f"{times:.3g} times the samples a second of now",
        "less": f"{percent(times)} of the samples a second of now",
    }["same" if abs(times - 1) < 0.005 else "more" if times > 1 else "less"]
    return {
        "step_s": step, "step_now_s": before, "times": times, "mem_mib": then.verdict.memory.total / predict.MIB,
        "headline": f"{seconds(step)} a step, {more}",
        "lines": [
            f"{count(rate)} samples/s on {wanted.ranks} ranks;"
            f" exposed communication {seconds(comm)}, {percent(comm / step)} of a step.",
            f"Memory of the fullest rank {nbytes(then.verdict.memory.total)}; plan {then.request.plan}.",
        ],
        "note": _trust(where, off, measured),
    }  # fmt: skip


def _trust(where: Cluster, off: float, measured: float | None) -> str:
    if measured is None:
        return f"Prices are those of the cluster {where.name}; this run has no measured step yet."
    how = f"{percent(abs(off - 1))} {'above' if off > 1 else 'below'} the planner's price"
    return (
        f"This run's step was measured {how} on the cluster {where.name}. Answers are corrected by that factor;"
        f" where something else limits, they may be wrong by as much."
    )


def _batch(run: Loaded) -> int:
    batch, problem = batch_of(run.plan, run.recipe.train)
    if batch is None:
        raise ConfigProblems([problem] if problem else [])
    return batch.global_batch


def _other(folder: Path, run: Loaded, wanted: WhatIf, environ: Mapping[str, str]) -> Loaded:
    """The recipe with other replicas and another batch; the micro-batch stays, so that a rank's memory does."""
    replicas, left = divmod(wanted.ranks, run.plan.inner)
    if left or not replicas:
        raise UsageError(
            f"{wanted.ranks} ranks are no multiple of the {run.plan.inner} of a replica", where="ranks",
            fix=f"a multiple of {run.plan.inner}", code="P14",
        )  # fmt: skip
    micro = run.recipe.train.micro_batch or 1
    data_ranks = replicas * run.plan.shard
    micros = wanted.batch // (micro * data_ranks)
    if micros < 1:  # fewer samples than ranks have room for: smaller micro-batches
        micro, micros = max(1, wanted.batch // data_ranks), 1
    if micro * micros * data_ranks != wanted.batch:
        raise UsageError(
            f"{wanted.batch} samples do not go evenly over {data_ranks} ranks", where="batch",
            fix=f"a multiple of {data_ranks}", code="P11",
        )  # fmt: skip
    plan = replace(run.plan, dp=replicas, micros=micros)
    train = run.recipe.train.model_copy(update={"global_batch": wanted.batch, "micro_batch": micro})
    return replace(run, plan=plan, recipe=run.recipe.model_copy(update={"train": train}))


def _priced(run: Loaded, wanted: WhatIf, environ: Mapping[str, str]) -> tuple[Any, Cluster]:
    """(what `simulate` says, the cluster)."""
    kind = run.recipe.model.kind
    if ".py:" in kind or kind.startswith("hf:"):
        raise UsageError(f"model.kind={kind} is traced with torch to be priced", where="model.kind",
                         fix="unisono simulate RUN", code="C22")  # fmt: skip
    batch, problem = batch_of(run.plan, run.recipe.train)
    if batch is None:
        raise ConfigProblems([problem] if problem else [])
    where, stack, _ = predict.here(environ)
    where = predict.roomy(serving(where, run.recipe), run.plan.world)
    links = tuple(
        replace(link, bandwidth=link.bandwidth * wanted.link, ceiling=link.ceiling and link.ceiling * wanted.link,
                groups=tuple((n, rate * wanted.link) for n, rate in link.groups))
        for link in where.links
    )  # fmt: skip
    where = replace(where, links=links)
    ask = PlanRequest(model_of(run, environ), run.plan, where, stack, batch.micro_batch, batch.micros)
    return simulate(ask), where
