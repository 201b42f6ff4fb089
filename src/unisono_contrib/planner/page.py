"""The page of one price, and the same as the object of --json: what it takes, where a step goes, what is sent."""

from dataclasses import replace
from typing import Any

from unisono.planner.formatting import (
    Column,
    Description,
    Row,
    cost,
    device_hours,
    figures,
    gibibytes,
    lines,
    many,
    parts,
    share,
    shared_out,
    stages,
    summary,
    table,
)
from unisono.planner.replicas import fidelity
from unisono.planner.request import StepTimes
from unisono.planner.simulate import GIB, PlanResult, gib
from unisono.planner.stalls import Loading, fed, with_waits
from unisono.spec.fidelity import Fidelity
from unisono.spec.words import nbytes
from unisono.spec.words import seconds as duration

_TRAFFIC = (
    Column("axis", "axis"), Column("a rank sends", "bytes", nbytes), Column("takes", "seconds", duration),
    Column("not hidden", "exposed_s", duration),
)  # fmt: skip


def facts_of(answer: PlanResult) -> dict[str, Any]:
    """The object of the contract, and what else is known."""
    ask, got = answer.request, answer.price
    exact, why = fidelity(ask.plan)
    return figures(answer) | {
        "error_because": list(answer.trust.because),
        "not_measured": list(answer.trust.unheld),
        "tflops_per_device": answer.tflops,
        "mem_gib": gib(answer.verdict.memory),
        "capacity_gib": answer.verdict.capacity / GIB,
        "fits": answer.verdict.fits,
        "comm": {
            axis: {"bytes": t.bytes, "seconds": t.seconds, "exposed_s": t.exposed} for axis, t in got.comm.items()
        },
        "samples_per_s": ask.batch / got.step,
        "device_hours": device_hours(answer),
        "cost": cost(answer),
        "parameters": ask.model.workload.parameters,
        "active_parameters": ask.model.workload.active,
        "fidelity": exact.name,
        "fidelity_why": why,
        "cluster": ask.cluster.name,
        "stack": ask.stack.name,
        "stages": stages(answer),
        "batch": {"global_batch": ask.batch, "micro_batch": ask.micro_batch, "micros": ask.micros},
        "waterfall": parts(answer),
        "data": loading(fed(ask), got.step - got.loading),
    }  # fmt: skip


def loading(data: Loading, step: float) -> Row:
    """What each host has to load, and what of it is waited for. step: seconds of all else."""
    what, rate = data.limit
    return {
        "hosts": data.hosts, "samples_per_host": data.each, "needs_samples_s": data.each / step,
        "needs_tokens_s": data.each * data.tokens / step, "stored_bytes": data.sample.stored,
        "copied_bytes": data.sample.copied, "gives_samples_s": dict(data.rates), "limit": what or None,
        "gives": rate if data.rates else None, "said": data.said, "seconds": data.seconds,
        "exposed_s": max(0.0, data.seconds - step),
    }  # fmt: skip


def describe_stragglers(answer: PlanResult, law: StepTimes) -> Description:
    """What ranks wait for the slowest of them, which is part of the answer's price."""
    price, plan = answer.price, answer.request.plan
    calm = with_waits(price.bare, replace(answer.request, stragglers=None)).step
    facts = {"law": law.name, "step_s": price.step, "waiting_s": price.straggling, "without_s": calm}
    said = (
        f"{law.name}: {duration(price.straggling)} of a step are waiting among {plan.world} ranks; without"
        f" stragglers it takes {duration(calm)}"
    )
    return {"stragglers": facts}, lines([("stragglers", said)])[0]


def page_of(answer: PlanResult) -> str:
    """The same for people: memory, speed, days and error first, then where a step goes."""
    shown, memory = facts_of(answer), gib(answer.verdict.memory)
    said = [*summary(answer), *shared_out(answer)]
    if shown["fidelity"] == Fidelity.LOSSY.name:
        said.append(("fidelity", f"LOSSY: {shown['fidelity_why']}"))
    said.append(("data", _loaded(shown["data"], answer.request.model.context)))
    traffic = [{"axis": axis, **row} for axis, row in shown["comm"].items()]
    kept = [f"{name} {gibibytes(part)}" for name, part in memory.items() if part and name != "total"]
    text = [*lines(said), "", *_drawn(answer)]
    text += ["", *table(_TRAFFIC, traffic)] if traffic else []
    return "\n".join([*text, "", f"  memory of the fullest rank: {', '.join(kept)}"])


def _loaded(data: Row, tokens: int) -> str:
    each = f"each of {data['hosts']:,} hosts" if data["hosts"] > 1 else "the host"
    rate = f", {many(data['needs_tokens_s'])} tokens/s" if tokens > 1 else ""
    needs = f"{each} has to load {many(data['needs_samples_s'])} samples/s{rate}"
    if data["exposed_s"]:
        late = duration(data["exposed_s"])
        return f"{needs}; {data['limit']} gives {many(data['gives'])}: {late} of a step are waited for"
    if not data["said"]:
        return f"{needs}: assumed fast enough (--loader-samples-s, --loader-gb-s price a slower one)"
    return f"{needs}; hidden: {data['limit']} gives {many(data['gives'])}"


def _drawn(answer: PlanResult) -> list[str]:
    """The waterfall as a table, without what is too small to be seen."""
    step = answer.price.step
    unit, times = ("s", 1.0) if step >= 0.1 else ("ms", 1e3)
    columns = (Column("where a step goes", "what"), Column(unit, "seconds", lambda s: f"{s * times:.4f}"),
               Column("", "share", share), Column("", "bar"))  # fmt: skip
    rows = [{**row, "share": row["seconds"] / step} for row in parts(answer)]
    rows = [
        {**row, "bar": "#" * max(0, round(40 * row["share"]))} for row in rows if abs(row["share"]) >= 5e-4
    ]
    return table(columns, rows)
