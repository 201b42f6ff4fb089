"""What failures cost: how often to save, and which share of the time is left for training.

The model of failures is `spec.interval`'s, by which runs choose how often to save too. Times in seconds.
"""

from typing import Annotated

from unisono.plan import Plan
from unisono.planner.formatting import Description, lasting, share
from unisono.planner.simulate import PlanResult
from unisono.planner.source import Source
from unisono.planner.states import moments_of
from unisono.spec.interval import daly, goodput, young

_SAVED = Source(
    "specification", "what train saves of an element: its weight and each of the moments, in fp32"
)
CHECKPOINT_BYTES: Annotated[float, _SAVED] = 4.0


def describe(answer: PlanResult, mtbf: float, rate: float, restart: float) -> Description:
    """The key `failures`. mtbf: of the whole job. rate: bytes/s of the storage, writing and reading. restart: from a
    failure to the next step, less reading. The interval is Daly's, in whole steps."""
    model, step = answer.request.model, answer.price.step
    elements = model.workload.parameters
    moments = moments_of(model, Plan(), elements, model.n_layer)
    size = elements * CHECKPOINT_BYTES * (1 + moments)
    save = size / rate
    work = max(1, round(daly(save, mtbf) / step)) * step
    good = goodput(work, save, mtbf, restart + save)
    saving = good * save / work
    days = answer.days / good if good else None
    facts = {
        "goodput": good, "mtbf_s": mtbf, "saving": saving, "lost": 1.0 - good - saving, "days": days,
        "failures_per_day": 86400.0 / mtbf, "checkpoint_gb": size / 1e9, "checkpoint_s": save, "interval_s": work,
        "young_s": young(save, mtbf), "daly_s": daly(save, mtbf),
    }  # fmt: skip
    head = f"goodput {share(good)}"
    if days is None:
        head = "the job never gets further: failures come before a checkpoint is written"
    elif answer.request.steps:
        head += f": {days:.4g} days instead of {answer.days:.4g}, with {days * 86400 / mtbf:,.3g} failures"
    return {"failures": facts}, "\n  ".join([
        f"failures   {head}",
        f"a checkpoint of {size / 1e9:,.1f} GB takes {save:.3g} s; save every {lasting(work)} (Daly, 2006):"
        f" {100 * saving:.2f} % of the time",
        f"a failure every {lasting(mtbf)}; restarts and work done again: {100 * facts['lost']:.2f} % of the time",
    ])  # fmt: skip
