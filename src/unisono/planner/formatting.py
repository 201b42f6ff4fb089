"""Prices as text: plain rows, which are JSON as they are and tables for people, and the first lines of a page."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from unisono.planner.grouping import again_in_words, is_uniform
from unisono.planner.memory import MARGIN, MemoryVerdict
from unisono.planner.model_kinds import attending
from unisono.planner.simulate import GIB, PlanRequest, PlanResult
from unisono.spec.words import nbytes
from unisono.spec.words import seconds as duration

Row = Mapping[str, Any]
Description = tuple[Mapping[str, Any], str]  # keys of --json, and the text of the page
_WORDS = 11  # columns of a line's name


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table. key: of the row. said: a value in words, with its unit unless the title has it."""

    title: str
    key: str
    said: Callable[[Any], str] = str


def table(columns: Sequence[Column], rows: Sequence[Row]) -> list[str]:
    """Indented lines under the columns' titles. Names, first and last, stand to the left, numbers to the right; a row
    without a key leaves its cell empty."""
    cells = [[column.title for column in columns]]
    cells += [["" if row.get(c.key) is None else c.said(row[c.key]) for c in columns] for row in rows]
    wide = [max(map(len, column)) for column in zip(*cells, strict=True)]
    last = rows[0].get(columns[-1].key) if rows else None
    named = {0, len(columns) - 1} if isinstance(last, str | Mapping) else {0}
    return [
        "  "
        + "  ".join(
            f"{cell:{'<' if at in named else '>'}{w}}"
            for at, (cell, w) in enumerate(zip(line, wide, strict=True))
        ).rstrip()
        for line in cells
    ]


def lines(said: Iterable[tuple[str, str]]) -> list[str]:
    """`memory     61.3 GiB ...`: a name, and what it is."""
    return [f"{name:<{_WORDS}}{text}".rstrip() for name, text in said]


def room(verdict: MemoryVerdict) -> str:
    """What a device has for a rank that is too large for it, or for the margin beside it."""
    free = f", of which {share(MARGIN)} are left free as allocators differ by that" if verdict.fits else ""
    return f"{nbytes(verdict.capacity)}{free}"


def share(value: float) -> str:
    return f"{100 * value:.1f} %"


def figure(value: float) -> str:
    return f"{value:.4g}"


def many(value: float) -> str:
    return f"{value:,.0f}" if value >= 100.0 else f"{value:.3g}"


def gibibytes(value: float) -> str:
    """A size in GiB: `61.3 GiB`, `640 MiB`."""
    return nbytes(value * GIB)


def lasting(seconds: float) -> str:
    """Format a duration in the largest unit of which it is at least two: `3.5 h`."""
    for unit, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{many(seconds / length)} {unit}"
    return duration(seconds)


# --- where a step goes -----------------------------------------------------------------------------------------------


def waterfall(answer: PlanResult) -> list[tuple[str, float]]:
    """Return (label, seconds) pairs: the ideal, then every loss. All are 0 or more, and their sum is the step.

    Arithmetic that runs faster than peak (the masked half of attention, which is skipped; eight-bit products) is
    subtracted from the ideal.
    """
    ask, got, model = answer.request, answer.price, answer.request.model
    peak = ask.plan.world * ask.cluster.device.flops(ask.plan.precision)
    ideal, attention = model.step_flops(ask.batch) / peak, 0.0
    if got.attention:
        attention = got.attention - model.attention_flops(ask.batch) / peak
    above = [
        ("products below peak", got.arithmetic - ideal - attention),
        ("attention below peak", attention),
        ("other kernels, embedding, loss", got.kernels),
        ("computed a second time (recompute)", got.recompute),
        ("waiting for the host", got.host),
        *((f"exposed on {axis}", traffic.exposed) for axis, traffic in got.comm.items()),
        ("bubble", got.idle),
        ("uneven stages", got.uneven),
        ("optimiser", got.optimizer),
        ("fixed per step", got.fixed),
        ("stragglers", got.straggling),
        ("data loading", got.loading),
    ]
    less = sum(seconds for _, seconds in above if seconds < 0.0)
    steps = [("ideal: the model's arithmetic at peak", ideal + less), *above]
    return [(what, seconds) for what, seconds in steps if seconds > 1e-9 * got.step]


def losses(answer: PlanResult) -> dict[str, float]:
    """The waterfall without the ideal."""
    return {what: seconds for what, seconds in waterfall(answer) if not what.startswith("ideal")}


def bound(answer: PlanResult) -> str:
    """What takes most of the time beyond the arithmetic itself."""
    lost = losses(answer)
    return max(lost, key=lost.__getitem__)


def more_than(answer: PlanResult, other: PlanResult) -> dict[str, float]:
    """Seconds by which the parts of one step are longer than those of another, the greatest difference first."""
    parts, base = dict(waterfall(answer)), dict(waterfall(other))
    more = {what: parts.get(what, 0.0) - base.get(what, 0.0) for what in [*base, *parts]}
    return dict(sorted(more.items(), key=lambda part: -abs(part[1])))


def figures(answer: PlanResult) -> dict[str, Any]:
    """One plan as a row beside others."""
    ask, got = answer.request, answer.price
    return {
        "plan": str(ask.plan), "micro_batch": ask.micro_batch, "step_s": got.step, "tokens_per_s": answer.rate,
        "error_pct": answer.error_pct, "mem_gib": answer.verdict.memory.total / GIB, "mfu": answer.mfu,
        "bubble": answer.bubble, "exposed_comm_s": got.exposed, "bound": bound(answer),
        "days_to_train": answer.days, "assumed": list(ask.assumed), "not_built": list(ask.unplayed),
    }  # fmt: skip


def parts(answer: PlanResult) -> list[Row]:
    """The waterfall as rows."""
    return [{"what": what, "seconds": seconds} for what, seconds in waterfall(answer)]


# --- one price -------------------------------------------------------------------------------------------------------


def stages(answer: PlanResult) -> list[Row]:
    """Blocks of each row of the pipeline, and those of them that are computed again."""
    again = answer.played.recompute
    return [
        {"stage": row, "blocks": n, "recompute": {way: n * (way == again) for way in ("selective", "full")}}
        for row, n in enumerate(answer.stages)
    ]


def where(ask: PlanRequest) -> str:
    """Format the cluster: `dgx-a100:8: 64 a100 ...`, `here: 4 ranks on 2 cores, as unisono calibrate ...`."""
    used, cluster = ask.plan.world, ask.cluster
    if cluster.cores:
        ranks = f"{used} rank{'s' * (used != 1)}"
        return f"{cluster.name}: {ranks} on {cluster.cores} cores, as unisono calibrate measured them"
    every = f"{used} of {cluster.devices}" if used < cluster.devices else f"{used}"
    return (
        f"{cluster.name}: {every} {cluster.device.name}, priced as the software stack {ask.stack.name} runs"
    )


def rate(answer: PlanResult) -> str:
    """`226,243 tokens/s`; samples of what has no tokens."""
    return f"{many(answer.rate)} {'tokens' if answer.request.model.context > 1 else 'samples'}/s"


def summary(answer: PlanResult) -> list[tuple[str, str]]:
    """The first lines of a page: what is priced, what it takes, how far that may be trusted, and on what batch."""
    ask, verdict = answer.request, answer.verdict
    row = f" (pipeline row {verdict.row})" if ask.plan.pp > 1 else ""
    near = "" if verdict.is_safe else f": less to spare than the {share(MARGIN)} by which allocators differ"
    batch = (
        f"{ask.batch} = micro_batch {ask.micro_batch} x micros {ask.micros} x replicas {ask.plan.replicas}"
    )
    return [
        *([("assumed", "; ".join(ask.assumed))] if ask.assumed else []),
        ("plan", str(ask.plan)),
        *([("not built", f"train cannot play yet: {', '.join(ask.unplayed)}")] if ask.unplayed else []),
        ("cluster", where(ask)),
        ("memory", f"{nbytes(verdict.memory.total)} on the fullest rank{row}, of {nbytes(verdict.capacity)}{near}"),
        ("speed", f"{duration(answer.price.step)} a step, {rate(answer)}, MFU {share(answer.mfu)},"
                  f" bubble {share(answer.price.idle / answer.price.step)}; most is lost to: {bound(answer)}"),
        *([("training", training(answer))] if ask.steps else []),
        *errors(answer),
        *_lacking(ask),
        ("batch", batch),
    ]  # fmt: skip


def training(answer: PlanResult) -> str:
    """`2.33 days for 47,684 steps of 2,097,152 tokens: 3,582 device-hours`, and what they cost."""
    ask, spent = answer.request, cost(answer)
    price = f", {spent:,.0f} at cost_per_hour" if spent is not None else ""
    each = f" of {many(ask.batch * ask.model.context)} tokens" if ask.model.context > 1 else ""
    length = f"{lasting(86400 * answer.days)} for {ask.steps:,} steps{each}"
    hours = device_hours(answer)
    used = f"{many(hours)} device-hours" if hours >= 0.1 else f"{many(3600 * hours)} device-seconds"
    return f"{length}: {used}{price}"


def device_hours(answer: PlanResult) -> float:
    """Hours of all devices together that the run takes."""
    return 24 * answer.days * answer.request.plan.world


def cost(answer: PlanResult) -> float | None:
    """What the run costs; None where nobody has said what an hour of a device does."""
    hourly = answer.request.cluster.cost_per_hour
    return None if hourly is None else device_hours(answer) * hourly


def errors(answer: PlanResult) -> list[tuple[str, str]]:
    """How far a price may be off, and what of the request was never held to a measurement."""
    mean = answer.error_pct
    text = "not known" if mean is None else f"± {mean:.0f} % of a step's seconds, in the mean"
    reasons = [f"never measured: {reason}" for reason in answer.trust.unheld]
    reasons += [f"wider: {reason}" for reason in answer.trust.because if mean is not None]
    return [("error", text), *(("", reason) for reason in reasons)]


def _lacking(ask: PlanRequest) -> list[tuple[str, str]]:
    """A line where a plan names a precision that the device does not have."""
    name, device = ask.plan.precision, ask.cluster.device
    if name in device.peak or ask.cluster.cores:
        return []
    rate = f"{device.flops(name) / 1e12:.3g} TFLOP/s of another"
    return [("precision", f"{device.name} has no {name}: priced at the {rate}")]


def shared_out(answer: PlanResult) -> list[tuple[str, str]]:
    """Blocks of each stage; what recompute=auto and codec=auto come to."""
    said, parts, at = list[tuple[str, str]](), list[str](), 0
    for blocks, alike in groupby(answer.stages):
        count = len(list(alike))
        parts.append(
            f"{at}: {blocks:g} blocks" if count == 1 else f"{at} to {at + count - 1}: {blocks:g} blocks each"
        )
        at += count
    if at > 1:
        said.append(("stages", "; ".join(parts)))
    if answer.request.plan.recompute == "auto":
        said.append(("recompute", f"auto is {_again(answer)} here"))
    if (codec := answer.request.plan.codec) != (taken := answer.played.codec):
        said.append(("codec", f"{codec} takes {taken} here"))
    return said


def _again(answer: PlanResult) -> str:
    """What recompute=auto comes to: a mode, or how many blocks."""
    plan, model = answer.played, attending(answer.request.model)
    if model is None or is_uniform(plan):
        return plan.recompute
    return again_in_words(model, plan, answer.stages)
