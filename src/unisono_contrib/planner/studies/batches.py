"""Which batch: what the hardware likes, and what the gradient's noise makes of it (McCandlish et al., 2018).

To the same loss, a batch of B samples takes S(1 + N/B) steps and S N (1 + B/N) samples, N the gradient noise scale: far
below N a step's gradient is mostly noise and twice the batch halves the steps, far above it more samples teach little.
"""

from operator import itemgetter
from typing import Annotated, Any

from unisono.plan.checks import divisors
from unisono.planner.formatting import Column, Description, figure, many, share, table
from unisono.planner.pricing import verdict
from unisono.planner.simulate import PlanRequest, closed
from unisono.planner.source import Source
from unisono_contrib.planner.studies.sensitivity import dealt

# Of the best throughput, within which a batch is called large enough.
CLOSE: Annotated[float, Source("specification", "what the request asks for: within 5 % of the best")] = 0.05
_DOUBLINGS = 12
_LARGEST = 16  # samples of a micro-batch
_COLUMNS = (
    Column("batch", "global_batch", many), Column("micro_batch", "micro_batch"), Column("micros", "micros"),
    Column("step s", "step_s", figure), Column("tokens/s", "tokens_per_s", many),
    Column("of the best", "hardware", share),
)  # fmt: skip
_TO_THE_LOSS = (Column("time", "time", "{:.2f}".format), Column("samples", "samples", "{:.2f}".format))


def advise(ask: PlanRequest, noise: float | None = None) -> list[dict[str, Any]]:
    """Batches from one sample of each data rank on, doubling, on the plan's mesh, each with its fastest split that fits
    in memory. hardware: tokens per second beside the best. time, samples: to the same loss, beside the least of all."""
    rows = list[dict[str, Any]]()
    for samples in (1 << power for power in range(_DOUBLINGS + 1)):
        requests = [dealt(ask, size, samples // size) for size in divisors(samples) if size <= _LARGEST]
        fitting = [
            (closed(request).step, request)
            for request in requests
            if request.served and verdict(request).fits
        ]
        if fitting:
            step, request = min(fitting, key=itemgetter(0))
            rows.append({
                "global_batch": request.batch, "micro_batch": request.micro_batch, "micros": request.micros,
                "step_s": step, "tokens_per_s": request.batch * ask.model.context / step, "time": None, "samples": None,
            })  # fmt: skip
    best = max((row["tokens_per_s"] for row in rows), default=1.0)
    for row in rows:
        row["hardware"] = row["tokens_per_s"] / best
        if noise is not None:
            row["time"] = row["step_s"] * (1.0 + noise / row["global_batch"])
            row["samples"] = 1.0 + row["global_batch"] / noise
    if noise is not None and rows:
        least = min(row["time"] for row in rows)
        rows = [{**row, "time": row["time"] / least} for row in rows]
    return rows


def describe(ask: PlanRequest, noise: float | None = None) -> Description:
    """The key `batches`. noise: the gradient noise scale in samples, None where nobody has said."""
    head, rows, fastest = "which batch, on the same mesh", advise(ask, noise), None
    if not rows:
        return {"batches": None}, f"{head}\n  none fits in memory"
    enough = next(row for row in rows if row["hardware"] >= 1.0 - CLOSE)
    says = [
        f"the hardware is content from a batch of {enough['global_batch']:,} on (micro_batch {enough['micro_batch']},"
        f" accumulated {enough['micros']} times): {100 * enough['hardware']:.0f} % of the best throughput"
    ]
    if noise is None:
        says.append("what the loss makes of it: --noise-scale SAMPLES, as measured for your model and data")
    else:
        fast = min(rows, key=itemgetter("time"))
        near = min(rows, key=lambda row: abs(row["global_batch"] - noise))
        fastest = fast["global_batch"]
        says.append(
            f"fastest to the same loss: {fastest:,}, which takes {fast['samples']:.2f} times the fewest samples"
        )
        if near is not fast:
            says.append(f"at the noise scale, {near['global_batch']:,}: {near['time']:.2f} times that time,"
                        f" {near['samples']:.2f} times the samples")  # fmt: skip
    facts = {
        "rows": rows,
        "enough": enough["global_batch"],
        "fastest": fastest,
        "noise_scale": noise,
        "says": says,
    }
    columns = _COLUMNS + (_TO_THE_LOSS if noise is not None else ())
    return {"batches": facts}, "\n".join([head, *table(columns, rows), *(f"  {said}" for said in says)])
