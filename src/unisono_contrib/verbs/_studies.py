"""`unisono simulate` beyond one price: what would help, failures, stragglers, batches, orders, cuts, sweeps."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.config import Loaded
from unisono.config.resolve import on_any_ranks
from unisono.plan import Plan
from unisono.planner import simulate
from unisono.planner.clusters import of_size
from unisono.planner.formatting import Description
from unisono.planner.from_recipe import judged, of_tokens
from unisono.planner.machines.cluster import Cluster
from unisono.planner.model_kinds import kind
from unisono.planner.simulate import PlanRequest, PlanResult
from unisono.planner.studies import orders
from unisono.spec.errors import Infeasible, UsageError
from unisono.verbs._sizes import model_of
from unisono_contrib.planner import stragglers
from unisono_contrib.planner.demand import demand
from unisono_contrib.planner.page import describe_stragglers, facts_of, page_of
from unisono_contrib.planner.studies import batches, failures, recut, sensitivity

if TYPE_CHECKING:
    from unisono.planner.search import Space

# Flags that look closely at one price.
_SINGLE = (
    "mtbf", "stragglers", "tokens", "batches", "noise_scale", "trace", "order",
)  # fmt: skip


def single(ask: PlanRequest, flags: Any) -> Description:
    """(the object of --json, the page) of one plan. flags: the verb's flags. Raises DoesNotFit, UsageError, OSError."""
    ask = with_flags(ask, flags)
    if flags.out is not None:
        _drawable(flags.out)
    every = orders.compared(ask) if flags.order == orders.BEST else []
    answer = orders.best(every) if every else simulate.simulate(ask)
    better = recut.better(answer)
    demand(answer, recut.sentence(better, answer) if better is not None else "")
    ordered = orders.describe(answer, every)
    shown = [ordered[1]] if flags.order is not None else []
    descriptions = [
        (facts_of(answer), page_of(answer)),
        recut.describe(better, answer),
        *_extras(answer, flags),
    ]
    facts = {key: value for row, _ in (*descriptions, ordered) for key, value in row.items()}
    page = "\n\n".join(
        text for text in (descriptions[0][1], *shown, *(text for _, text in descriptions[1:])) if text
    )
    if flags.out is None and flags.trace is None:
        return facts, page
    written = _pictures(answer, facts, flags.out, flags.trace)
    return {**facts, "written": written}, "\n".join([page, "", *(f"written    {path}" for path in written)])


def _pictures(answer: PlanResult, facts: Mapping[str, Any], out: str | None, trace: str | None) -> list[str]:
    """Writes what is asked for, a picture or a trace, and returns the paths. Raises UsageError, OSError."""
    # Imported here because most prices are not drawn.
    from unisono.observe.trace import write_groups
    from unisono.report.placed import lanes
    from unisono_contrib.planner.timeline import timeline
    from unisono_contrib.report.forecast import Forecast, write

    step = timeline(answer.request, answer.price)
    count = len(step.timetable.rows)
    names = [f"pp={row}" if count > 1 else "all ranks" for row in range(count)]
    written: list[Path] = []
    if out is not None:
        written.append(write(Forecast(facts, step.placed, step.after, names), out))
    if trace is not None:
        written.append(write_groups(trace, {"simulated": lanes(step.placed, names, step.after)}))
    return [str(path) for path in written]


def with_flags(ask: PlanRequest, flags: Any) -> PlanRequest:
    """The request with what the flags change of it: length of the training, price of an hour, loader, stragglers.

    Raises UsageError.
    """
    ask = of_tokens(ask, flags.tokens)
    ask = replace(ask, cluster=equipped(ask.cluster, flags))
    if flags.stragglers is not None:
        ask = replace(ask, stragglers=_law(flags.stragglers))
    return ask


def equipped(cluster: Cluster, flags: Any) -> Cluster:
    """The cluster with what the flags say of it: price of an hour, and what the loader of each host gives."""
    if flags.cost_per_hour is not None:
        cluster = replace(cluster, cost_per_hour=flags.cost_per_hour)
    usual = cluster.loader
    loader = replace(
        usual,
        samples=flags.loader_samples_s or usual.samples,
        bandwidth=(flags.loader_gb_s or 0.0) * 1e9 or usual.bandwidth,
        stored=(flags.sample_kb or 0.0) * 1e3 or usual.stored,
    )
    return replace(cluster, loader=loader)


def _extras(answer: PlanResult, flags: Any) -> Iterator[Description]:
    """What comes after the price. Raises UsageError."""
    ask = answer.request
    if ask.stragglers is not None:
        yield describe_stragglers(answer, ask.stragglers)
    if flags.mtbf is not None:
        yield _failing(answer, flags)
    yield sensitivity.describe(sensitivity.sensitivities(ask))
    if flags.batches or flags.noise_scale is not None:
        yield batches.describe(ask, flags.noise_scale)


def _law(text: str) -> stragglers.Law:
    """A distribution; `measured:RUN` is how unevenly each rank of a run worked, its first step left out."""
    kind, _, place = text.partition(":")
    if kind != "measured" or not place or not Path(place).is_dir():
        return stragglers.law(text)
    from unisono.report.collect import collect
    from unisono.report.verdict.evidence import BUSY
    from unisono.spec.runs import run_folder

    times: list[float] = []
    for rank in collect(run_folder(place)).ranks:
        busy = [sum(record["time"].get(part) or 0.0 for part in BUSY) for record in rank.steps[1:]]
        mean = sum(busy) / len(busy) if busy else 0.0
        times += [seconds / mean for seconds in busy if mean > 0.0]
    if not times:
        what = f"{place} holds no steps of single ranks beyond the first"
        raise UsageError(
            what, where="--stragglers", fix="a run of several steps, with its events/", code="C03"
        )
    return stragglers.measured(times)


def _failing(answer: PlanResult, values: Any) -> Description:
    if missing := [flag for flag in ("checkpoint_gb_s", "restart_s") if getattr(values, flag) is None]:
        flags = " and ".join(f"--{flag.replace('_', '-')}" for flag in missing)
        fix = "--mtbf 50000 --checkpoint-gb-s 100 --restart-s 300"
        raise UsageError(f"--mtbf needs {flags}", where="unisono simulate", fix=fix, code="C04")
    hours, unit = values.mtbf
    ask = answer.request
    units = {"device": ask.plan.world, "node": ceil(ask.plan.world / ask.cluster.node), "cluster": 1}[unit]
    return failures.describe(answer, hours * 3600.0 / units, values.checkpoint_gb_s * 1e9, values.restart_s)


# --- studies of many plans -------------------------------------------------------------------------------------------


def many(got: Loaded, environ: Mapping[str, str], flags: Any) -> Description | None:
    """The study of --sweep; None where it is not asked for. Raises UsageError, Infeasible."""
    if flags.sweep is None:
        if flags.weak:
            fix = "--sweep devices=8..1024 --weak"
            raise UsageError("--weak is for a sweep", where="--weak", fix=fix, code="C04")
        return None
    if alone := [f"--{flag.replace('_', '-')}" for flag in _SINGLE if getattr(flags, flag)]:
        raise UsageError(
            f"{' '.join(alone)}: --sweep prices a plan at each point, and looks at none of them more closely",
            where="unisono simulate --sweep",
            fix=f"{alone[0]} with one --plan, without --sweep",
            code="C04",
        )
    if flags.out is not None:
        _drawable(flags.out)
    # Imported here because it searches, which one plan's price must not pay.
    from unisono_contrib.planner.studies import sweep

    base, legal = _space(got, environ, flags)

    def sized(devices: int) -> Cluster:
        return equipped(of_size(flags.cluster, devices), flags)

    over = sweep.axis(flags.sweep)
    rows = sweep.sweep(base, over, sized, weak=flags.weak, legal=legal)
    facts, text = sweep.describe(base, over, rows, flags.weak)
    if flags.out is not None:
        text += f"\npicture    {_draw(facts, base, flags.out)}"
    if all(row["plan"] is None for row in rows):
        raise Infeasible(facts["sweep"]["says"], where=f"--sweep {flags.sweep}", fix="a larger --cluster")
    return facts, text


def _drawable(out: str) -> None:
    if Path(out).suffix not in (".png", ".svg"):
        what = f"--out {out}: pictures are .png or .svg"
        raise UsageError(what, where="--out", fix=f"--out {Path(out).with_suffix('.png')}", code="C04")


def _draw(facts: Mapping[str, Any], base: "Space", out: str) -> Path:
    from unisono_contrib.report import scaling

    model = base.model
    title = (
        f"{model.workload.parameters / 1e9:.3g} billion parameters on {base.cluster.device.name},"
        f" batch {base.batch} of {model.context} tokens, {base.held.precision}, stack {base.stack.name}"
    )
    return scaling.write(facts["sweep"], title, out)


def _space(
    got: Loaded, environ: Mapping[str, str], flags: Any
) -> "tuple[Space, Callable[[Space], Callable[[Plan], bool]]]":
    """What is searched, and what a plan must be at each point. Techniques that are held may be unbuilt."""
    # Keys of --plan are held; those of a recipe's own plan are for its own number of devices.
    from unisono.planner.space import space_of

    base = space_of(got, model_of(got, environ), None, flags.cluster, flags.stack)
    base = replace(base, besides=lambda devices: ())
    if got.origins.get("plan", "").startswith("flag"):
        base = replace(base, held=got.plan)
    recipe = on_any_ranks(got.recipe)

    def legal(at: "Space") -> Callable[[Plan], bool]:
        sizes = {"global_batch": at.batch, "micro_batch": at.micro_batch}
        model = recipe.model.model_copy(update={"context": at.model.context})
        checked = {"train": recipe.train.model_copy(update=sizes), "model": model}
        varied = recipe.model_copy(update=checked)
        read = judged(varied, at.model)
        return lambda plan: not kind(at.model).problems(at.model, plan) and not plan.check(read)

    return replace(base, cluster=equipped(base.cluster, flags)), legal
