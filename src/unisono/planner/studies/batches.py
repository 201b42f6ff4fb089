"""Which batch: what the hardware likes, and what the gradient's noise makes of it (McCandlish et al., 2018).

To the same loss, a batch of B samples takes S(1 + N/B) steps and S N (1 + B/N) samples, N the gradient noise scale: far
below N a step's gradient is mostly noise and twice the batch halves the steps, far above it more samples teach little.
"""

from dataclasses import dataclass, replace
from typing import Annotated

from unisono.plan.checks import divisors
from unisono.planner.machines.cluster import Source
from unisono.planner.simulate import Question, closed, verdict_of
from unisono.planner.studies.sensitivity import dealt
from unisono.planner.tell import Column, Row, Told, figure, many, share, table

# Of the best throughput, within which a batch is called large enough.
CLOSE: Annotated[float, Source("specification", "what the question asks for: within 5 % of the best")] = 0.05
_DOUBLINGS = 12
_LARGEST = 16  # samples of a micro-batch
_COLUMNS = (
    Column("batch", "global_batch", many), Column("micro_batch", "micro_batch"), Column("micros", "micros"),
    Column("step s", "step_s", figure), Column("tokens/s", "tokens_per_s", many),
    Column("of the best", "hardware", share),
)  # fmt: skip
_TO_THE_LOSS = (
    Column("time", "time", lambda v: f"{v:.2f}"),
    Column("samples", "samples", lambda v: f"{v:.2f}"),
)


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

    @property
    def row(self) -> Row:
        return {
            "global_batch": self.batch, "micro_batch": self.micro_batch, "micros": self.micros, "step_s": self.step,
            "tokens_per_s": self.rate, "hardware": self.hardware, "time": self.time, "samples": self.samples,
        }  # fmt: skip


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
    powers = range(_DOUBLINGS + 1)
    splits = [split for power in powers if (split := _split(ask, 1 << power)) is not None]
    if not splits:
        return None
    rates = [other.batch * ask.model.context / step for other, step in splits]
    rows = [
        BatchChoice(other.batch, other.micro_batch, other.micros, step, rate, rate / max(rates))
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


def _split(ask: Question, samples: int) -> tuple[Question, float] | None:
    """The fastest micro-batch and accumulation of so many samples a data rank, and its step."""
    asked = [dealt(ask, size, samples // size) for size in divisors(samples) if size <= _LARGEST]
    found = [(other, closed(other).step) for other in asked if other.served and verdict_of(other).fits]
    return min(found, key=lambda one: one[1], default=None)


def sentences(advice: Advice) -> list[str]:
    enough, fast, noise = advice.enough, advice.fastest, advice.noise
    said = [
        f"the hardware is content from a batch of {enough.batch:,} on (micro_batch {enough.micro_batch}, accumulated"
        f" {enough.micros} times): {100 * enough.hardware:.0f} % of the best throughput"
    ]
    if fast is None or noise is None:
        return [
            *said,
            "what the loss makes of it: --noise-scale SAMPLES, as measured for your model and data",
        ]
    near = min(advice.rows, key=lambda row: abs(row.batch - noise))
    said.append(
        f"fastest to the same loss: {fast.batch:,}, which takes {fast.samples:.2f} times the fewest samples"
    )
    if near.batch != fast.batch:
        said.append(
            f"at the noise scale, {near.batch:,}: {near.time:.2f} times that time, {near.samples:.2f} times the samples"
        )
    return said


def told(advice: Advice | None) -> Told:
    head = "which batch, on the same mesh"
    if advice is None:
        return {"batches": None}, f"{head}\n  none fits in memory"
    rows, says = [one.row for one in advice.rows], sentences(advice)
    facts = {
        "rows": rows, "enough": advice.enough.batch, "fastest": advice.fastest.batch if advice.fastest else None,
        "noise_scale": advice.noise, "says": says,
    }  # fmt: skip
    columns = _COLUMNS + (_TO_THE_LOSS if advice.noise is not None else ())
    return {"batches": facts}, "\n".join(
        [head, *table(columns, rows), *(f"  {sentence}" for sentence in says)]
    )
