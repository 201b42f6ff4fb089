"""`unisono simulate` beyond one price: what would help, failures, stragglers, cost, batches, networks, sweeps."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.config import Loaded
from unisono.config.resolve import on_any_ranks
from unisono.plan import Plan
from unisono.planner import (
    batches,
    energy,
    orders,
    orders_told,
    outlook,
    pieces,
    recut,
    replicas,
    sensitivity,
    simulate,
    stragglers,
)
from unisono.planner.asked import NOT_BUILT
from unisono.planner.clusters import of_size
from unisono.planner.machines.cluster import Cluster
from unisono.planner.simulate import Answer, Question
from unisono.planner.work.transformer import Transformer
from unisono.spec.errors import Infeasible, UsageError
from unisono.verbs._sizes import model_of

if TYPE_CHECKING:
    from unisono.planner.search import Space

Told = tuple[Mapping[str, Any], str]

# Flags that look closely at one price.
_SINGLE = ("mtbf", "stragglers", "servers", "tokens", "pue", "batches", "noise_scale", "blocks", "trace")


def single(ask: Question, given: Any) -> Told:
    """(the object of --json, the page) of one plan. given: the verb's flags. Raises DoesNotFit, UsageError, OSError."""
    ask = asked(ask, given)
    every = orders.compared(ask) if given.order == orders.BEST else None
    answer = simulate.simulate(ask) if every is None else every.best
    better = recut.better(answer)
    simulate.demand(answer, recut.sentence(better, fits=False) if better is not None else "")
    keys, text = extras(answer, given)
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


def asked(ask: Question, given: Any) -> Question:
    """The question with what the flags change of it: length of the training, price of an hour, loader, stragglers.

    Raises UsageError.
    """
    if given.tokens is not None:
        ask = replace(ask, steps=ceil(given.tokens / (ask.batch * ask.model.context)))
    ask = replace(ask, cluster=equipped(ask.cluster, given))
    if given.stragglers is not None:
        ask = replace(ask, stragglers=_law(given.stragglers))
    return ask


def equipped(cluster: Cluster, given: Any) -> Cluster:
    """The cluster with what the flags say of it: price of an hour, and what the loader of each host gives."""
    if given.cost_per_hour is not None:
        cluster = replace(cluster, cost_per_hour=given.cost_per_hour)
    own = cluster.loader
    loader = replace(
        own,
        samples=given.loader_samples_s or own.samples,
        bandwidth=(given.loader_gb_s or 0.0) * 1e9 or own.bandwidth,
        stored=(given.sample_kb or 0.0) * 1e3 or own.stored,
    )
    return replace(cluster, loader=loader)


def extras(answer: Answer, given: Any) -> Told:
    """(keys for --json, lines) that come after the price. Raises UsageError."""
    ask = answer.question
    told = [_bill(answer, given.pue), _fidelity(answer)]
    if ask.stragglers is not None:
        told.append(outlook.waiting(answer, ask.stragglers))
    if given.servers is not None:
        told.append(outlook.served(answer, given.servers))
    if given.mtbf is not None:
        told.append(_failing(answer, given))
    found = sensitivity.sensitivities(ask)
    told.append((sensitivity.as_json(found), sensitivity.as_text(found)))
    if given.batches or given.noise_scale is not None:
        advice = batches.advise(ask, given.noise_scale)
        told.append((batches.as_json(advice), batches.as_text(advice)))
    if given.networks == "same":
        from unisono.planner import networks

        rows = networks.same_plan(ask)
        told.append((networks.as_json(rows), networks.as_text(rows)))
    keys: dict[str, Any] = {}
    for part, _ in told:
        keys |= part
    return keys, "\n\n".join(text for _, text in told if text)


def _bill(answer: Answer, pue: float | None) -> Told:
    ask = answer.question
    got = energy.bill(ask.cluster, ask.plan.world, answer.days * 86400.0, pue or energy.PUE)
    return energy.as_json(got), energy.as_text(got) if ask.steps else ""


def _fidelity(answer: Answer) -> Told:
    ask = answer.question
    thin = (
        replicas.low_rank(ask.model, ask.plan.tp)
        if isinstance(ask.model, Transformer)
        else (lambda rank: 1.0)
    )
    made = replicas.code(ask.plan.codec, ask.plan.dp, ask.stack.reduce_bytes, thin)
    fidelity, why = replicas.fidelity(ask.plan, made)
    text = f"fidelity   {fidelity.name}: {why}" if not replicas.plain(ask.plan) or made.said else ""
    return {"fidelity": fidelity.name, "fidelity_why": why}, text


def _law(text: str) -> stragglers.Law:
    """A distribution; `measured:RUN` is how unevenly each rank of a run worked, its first step left out."""
    kind, _, place = text.partition(":")
    if kind != "measured" or not place or not Path(place).is_dir():
        return stragglers.law(text)
    from unisono.report.analyse import BUSY
    from unisono.report.collect import collect
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


def _failing(answer: Answer, given: Any) -> Told:
    missing = [
        flag
        for flag, value, wanted in (
            ("--checkpoint-gb-s", given.checkpoint_gb_s, not given.elastic),
            ("--restart-s", given.restart_s, True),
            ("--repair-h", given.repair_h, given.elastic),
        )
        if wanted and value is None
    ]
    if missing:
        raise UsageError(
            f"--mtbf needs {' and '.join(missing)}", where="unisono simulate",
            fix="--mtbf 50000 --checkpoint-gb-s 100 --restart-s 300", code="C04",
        )  # fmt: skip
    hours, unit = given.mtbf
    ask = answer.question
    units = {"device": ask.plan.world, "node": ceil(ask.plan.world / ask.cluster.node), "cluster": 1}[unit]
    mtbf = hours * 3600.0 / units
    if given.elastic:
        return outlook.elastic(answer, mtbf, given.repair_h * 3600.0, given.restart_s)
    return outlook.stopping(answer, mtbf, given.checkpoint_gb_s * 1e9, given.restart_s)


# --- studies of many plans -------------------------------------------------------------------------------------------


def many(got: Loaded, environ: Mapping[str, str], given: Any) -> Told | None:
    """The study of --sweep or of --networks best; None where neither is asked for. Raises UsageError, Infeasible."""
    if given.weak and given.sweep is None:
        raise UsageError(
            "--weak is for a sweep", where="--weak", fix="--sweep devices=8..1024 --weak", code="C04"
        )
    if given.sweep is None and given.networks != "best":
        return None
    if single := [f"--{flag.replace('_', '-')}" for flag in _SINGLE if getattr(given, flag)]:
        many = "--sweep" if given.sweep else "--networks best"
        raise UsageError(
            f"{' '.join(single)}: {many} prices a plan at each point, and looks at none of them more closely",
            where=f"unisono simulate {many}",
            fix=f"{single[0]} with one --plan, without {many}",
            code="C04",
        )
    if given.order is not None:
        raise UsageError(
            "a study of many plans prices each with its axes in the usual order",
            where="--order, --sweep, --networks", fix="--order without them, or --networks same", code="C04",
        )  # fmt: skip
    if given.out is not None:
        _drawable(given.out)
    # Imported here because they search, which one plan's price must not pay.
    from unisono.planner import networks, sweep

    base, legal = _space(got, environ, given)
    if given.sweep is None:
        rows = networks.best_plans(replace(base, legal=legal(base)))
        if all(row.answer is None for row in rows):
            raise Infeasible("no plan fits on any network", where=base.cluster.name, fix="a larger --cluster")
        return networks.as_json(rows), networks.as_text(rows)

    def sized(devices: int) -> Cluster:
        return equipped(of_size(given.cluster, devices), given)

    study = sweep.sweep(base, sweep.axis(given.sweep), sized, weak=given.weak, legal=legal)
    told, text = sweep.as_json(study), sweep.as_text(study)
    if given.out is not None:
        text += f"\npicture    {_draw(told, base, given.out)}"
    if all(point.answer is None for point in study.points):
        raise Infeasible(sweep.breaks(study)[1], where=f"--sweep {given.sweep}", fix="a larger --cluster")
    return told, text


def _drawable(out: str) -> None:
    if Path(out).suffix not in (".png", ".svg"):
        what = f"--out {out}: pictures are .png or .svg"
        raise UsageError(what, where="--out", fix=f"--out {Path(out).with_suffix('.png')}", code="C04")


def _draw(told: Mapping[str, Any], base: "Space", out: str) -> Path:
    from unisono.report import scaling

    model = base.model
    title = (
        f"{model.workload.parameters / 1e9:.3g} billion parameters on {base.cluster.device.name},"
        f" batch {base.batch} of {model.context} tokens, {base.held.precision}, stack {base.stack.name}"
    )
    return scaling.write(told["sweep"], title, out)


def _space(
    got: Loaded, environ: Mapping[str, str], given: Any
) -> "tuple[Space, Callable[[Space], Callable[[Plan], bool]]]":
    """What is searched, and what a plan must be at each point. Techniques that are held may be unbuilt."""
    # Keys of --plan are held; those of a recipe's own plan are for its own number of devices.
    from unisono.planner.space import space_of

    base = space_of(got, model_of(got, environ), None, given.cluster, given.stack)
    if got.origins.get("plan", "").startswith("flag"):
        base = replace(base, held=got.plan)
    recipe = on_any_ranks(got.recipe)

    def legal(at: "Space") -> Callable[[Plan], bool]:
        sizes = {"global_batch": at.batch, "micro_batch": at.micro_batch}
        model = recipe.model.model_copy(update={"context": at.model.context})
        asked = {"train": recipe.train.model_copy(update=sizes), "model": model}
        varied = recipe.model_copy(update=asked)
        return lambda plan: all(problem.code == NOT_BUILT for problem in plan.check(varied))

    return replace(base, cluster=equipped(base.cluster, given)), legal
