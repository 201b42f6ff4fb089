"""Which batch: what the hardware likes, and what the gradient's noise makes of it (McCandlish et al., 2018).

To the same loss, a batch of B samples takes S(1 + N/B) steps and S N (1 + B/N) samples, N the gradient noise scale: far
below N a step's gradient is mostly noise and twice the batch halves the steps, far above it more samples teach little.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from unisono.planner.machines.cluster import Source
from unisono.planner.quick import judged, priced
from unisono.planner.simulate import Question

# Of the best throughput, within which a batch is called large enough.
CLOSE: Annotated[float, Source("specification", "what the question asks for: within 5 % of the best")] = 0.05
_DOUBLINGS = 12
_MICRO_BATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """One global batch with its fastest split that fits. step: seconds. rate: tokens per second; hardware: beside the
    best of all. time, samples: to the same loss, beside the least of all, None without a noise scale."""

    batch: int
    micro_batch: int
    micros: int
    step: float
    rate: float
    hardware: float
    time: float | None = None
    samples: float | None = None


@dataclass(frozen=True, slots=True)
class Advice:
    """enough: the smallest batch within CLOSE of the best throughput. fastest: least time to the same loss. noise: the
    gradient noise scale in samples, None where nobody has said."""

    rows: tuple[BatchChoice, ...]
    enough: BatchChoice
    noise: float | None
    fastest: BatchChoice | None


def advise(ask: Question, noise: float | None = None) -> Advice | None:
    """Batches from one sample of each data rank on, doubling, on the plan's mesh. None where none fits in memory."""
    splits = [
        split
        for power in range(_DOUBLINGS + 1)
        if (split := _split(ask, ask.plan.replicas << power)) is not None
    ]
    if not splits:
        return None
    rates = [other.batch * ask.model.context / step for other, step in splits]
    best = max(rates)
    rows = [
        BatchChoice(other.batch, other.micro_batch, other.micros, step, rate, rate / best)
        for (other, step), rate in zip(splits, rates, strict=True)
    ]
    if noise is not None:
        times = [row.step * (1.0 + noise / row.batch) for row in rows]
        rows = [
            replace(row, time=time / min(times), samples=1.0 + row.batch / noise)
            for row, time in zip(rows, times, strict=True)
        ]
    enough = next(row for row in rows if row.hardware >= 1.0 - CLOSE)
    fastest = min(rows, key=lambda row: row.time or 0.0) if noise is not None else None
    return Advice(tuple(rows), enough, noise, fastest)


def _split(ask: Question, batch: int) -> tuple[Question, float] | None:
    """The fastest micro-batch and accumulation of one global batch, and its step."""
    share, found = batch // ask.plan.replicas, []
    for size in _MICRO_BATCHES:
        if share % size:
            continue
        plan = replace(ask.plan, micros=share // size)
        other = replace(ask, plan=plan, micro_batch=size, micros=share // size)
        if other.served and judged(other).fits:
            found.append((priced(other).step, size, other))
    if not found:
        return None
    step, _, other = min(found, key=lambda one: one[:2])
    return other, step


def sentences(advice: Advice) -> list[str]:
    enough = advice.enough
    said = [
        f"the hardware is content from a batch of {enough.batch:,} on (micro_batch {enough.micro_batch}, accumulated"
        f" {enough.micros} times): {100 * enough.hardware:.0f} % of the best throughput"
    ]
    if advice.noise is None or advice.fastest is None:
        return [
            *said,
            "what the loss makes of it: --noise-scale SAMPLES, as measured for your model and data",
        ]
    fast = advice.fastest
    near = min(advice.rows, key=lambda row: abs(row.batch - advice.noise) if advice.noise else 0.0)
    said.append(
        f"fastest to the same loss: {fast.batch:,}, which takes {fast.samples:.2f} times the fewest samples"
    )
    if near.time is not None and near.batch != fast.batch:
        said.append(
            f"at the noise scale, {near.batch:,}: {near.time:.2f} times that time, {near.samples:.2f} times the samples"
        )
    return said


def as_json(advice: Advice | None) -> Mapping[str, Any]:
    if advice is None:
        return {"batches": None}
    rows = [
        {
            "global_batch": row.batch, "micro_batch": row.micro_batch, "micros": row.micros, "step_s": row.step,
            "tokens_per_s": row.rate, "hardware": row.hardware, "time": row.time, "samples": row.samples,
        }
        for row in advice.rows
    ]  # fmt: skip
    told = {
        "rows": rows,
        "enough": advice.enough.batch,
        "fastest": advice.fastest.batch if advice.fastest else None,
        "noise_scale": advice.noise,
        "says": sentences(advice),
    }
    return {"batches": told}


def as_text(advice: Advice | None) -> str:
    lines = ["which batch, on the same mesh"]
    if advice is None:
        return "\n".join([*lines, "  none fits in memory"])
    head = f"  {'batch':>9}{'micro_batch':>13}{'micros':>8}{'step s':>10}{'tokens/s':>13}{'hardware':>10}"
    lines.append(head + (f"{'time':>8}{'samples':>9}" if advice.noise is not None else ""))
    for row in advice.rows:
        line = f"  {row.batch:>9,}{row.micro_batch:>13}{row.micros:>8}{row.step:>10.4g}{row.rate:>13,.0f}"
        line += f"{100 * row.hardware:>8.1f} %"
        if row.time is not None and row.samples is not None:
            line += f"{row.time:>8.2f}{row.samples:>9.2f}"
        lines.append(line)
    return "\n".join([*lines, *(f"  {sentence}" for sentence in sentences(advice))])


__all__: Sequence[str] = ("Advice", "BatchChoice", "advise", "as_json", "as_text", "sentences")
