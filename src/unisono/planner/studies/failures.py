"""What failures cost: how often to save, and which share of the time is left for training.

A fixed job stops at every failure, loads its last checkpoint and does again what came after it (Young, 1974; Daly,
2006). An elastic job goes on with the replicas that are left until the failed one is repaired. Times in seconds.
Failures are independent, and as likely at any moment: exponential times between them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, exp, expm1, inf, lgamma, log, log1p, sqrt
from typing import Annotated, Any

from unisono.planner.machines.cluster import Source
from unisono.planner.simulate import Answer, closed
from unisono.planner.tell import Told, lasting, share
from unisono.spec.errors import UsageError

_SAVED = Source(
    "specification", "what train saves of an element: its weight and each of the moments, in fp32"
)
CHECKPOINT_BYTES: Annotated[float, _SAVED] = 4.0
_RARE = 1e-12  # of the time: numbers of living replicas that are rarer are not priced


@dataclass(frozen=True, slots=True)
class Goodput:
    """goodput: share of the time that is progress. interval: seconds between checkpoints, inf: none. mtbf: seconds
    between failures anywhere in the job. saving, lost: shares of the time for checkpoints; for restarts, pauses, work
    done again and missing replicas. The three shares add up to 1."""

    goodput: float
    interval: float
    mtbf: float
    saving: float
    lost: float


def young(save: float, mtbf: float) -> float:
    """Seconds of work between checkpoints (Young, 1974): the first order, for `save` far below `mtbf`."""
    return sqrt(2.0 * save * mtbf)


def daly(save: float, mtbf: float) -> float:
    """The same in higher order (Daly, 2006); `mtbf` where saving takes longer than twice that."""
    if save >= 2.0 * mtbf:
        return mtbf
    small = save / (2.0 * mtbf)
    return sqrt(2.0 * save * mtbf) * (1.0 + sqrt(small) / 3.0 + small / 9.0) - save


def goodput(work: float, save: float, mtbf: float, restart: float) -> float:
    """Share of the time that is progress, with `work` seconds between checkpoints of `save` seconds.

    Exact for exponential failures, which may come during checkpoints and restarts too (Daly, 2006).
    """
    stretched = (work + save + restart) / mtbf
    if stretched > 700.0:  # a checkpoint is never reached
        return 0.0
    return work / (mtbf * exp(restart / mtbf) * expm1((work + save) / mtbf))


def fixed(save: float, mtbf: float, restart: float, step: float = 0.0) -> Goodput:
    """A job that stops at each failure; the interval is Daly's, in whole steps where `step` says how long one is."""
    work = daly(save, mtbf)
    if step:
        work = max(1, round(work / step)) * step
    share = goodput(work, save, mtbf, restart)
    saving = share * save / work if work else 0.0
    return Goodput(share, work, mtbf, saving, 1.0 - share - saving)


def elastic(
    replicas: int, mtbf: float, repair: float, pause: float, step: float, speed: Callable[[int], float]
) -> Goodput:
    """A job that goes on with the replicas that it has. mtbf: of one replica; repair: until it is back.

    pause: of everybody, to form the group anew, when a replica leaves or comes back. speed(k): pace with k replicas
    beside that with all; half a step is lost with each that leaves. With none left nothing goes on. Each replica is
    up for mtbf / (mtbf + repair) of the time, whatever the distribution of repairs, so the living ones are binomial;
    a moment is paused if one of the `pause` seconds before it saw a change.
    """
    up = mtbf / (mtbf + repair)
    leave = replicas * up / mtbf
    running = 0.0
    for alive in range(1, replicas + 1):
        share = _binomial(replicas, alive, up)
        if share > _RARE:
            running += share * speed(alive)
    running *= exp(-2.0 * leave * pause)
    running -= leave * 0.5 * step * exp(-2.0 * leave * pause)
    running = max(0.0, running)
    return Goodput(running, inf, mtbf / replicas, 0.0, 1.0 - running)


def _binomial(n: int, k: int, p: float) -> float:
    if p >= 1.0:
        return 1.0 if k == n else 0.0
    ways = lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)
    return exp(ways + k * log(p) + (n - k) * log1p(-p))


def stopping(answer: Answer, mtbf: float, rate: float, restart: float) -> Told:
    """A job that stops at failures. mtbf: of the whole job; rate: bytes/s of the storage, writing and reading."""
    model = answer.question.model
    size = model.workload.parameters * CHECKPOINT_BYTES * (1 + model.states)
    save = size / rate
    got = fixed(save, mtbf, restart + save, answer.price.step)
    facts = {
        "elastic": False, "checkpoint_gb": size / 1e9, "checkpoint_s": save, "interval_s": got.interval,
        "young_s": young(save, mtbf), "daly_s": daly(save, mtbf),
    }  # fmt: skip
    return _told(answer, got, facts, [
        f"a checkpoint of {size / 1e9:,.1f} GB takes {save:.3g} s; save every {lasting(got.interval)} (Daly, 2006):"
        f" {100 * got.saving:.2f} % of the time",
        f"a failure every {lasting(mtbf)}; restarts and work done again: {100 * got.lost:.2f} % of the time",
    ])  # fmt: skip


def going_on(answer: Answer, mtbf: float, repair: float, pause: float) -> Told:
    """A job that goes on with fewer replicas. mtbf: as above. Raises UsageError for a plan without replicas."""
    ask, dp = answer.question, answer.question.plan.dp
    if dp == 1:
        raise UsageError(
            "--elastic with dp=1: no replica is left to go on", where="--elastic, plan.dp",
            fix="dp=2 or more, or without --elastic", code="P16",
        )  # fmt: skip
    paces: dict[int, float] = {}

    def speed(alive: int) -> float:
        """The same batch, its leaves dealt anew: the fullest replica has the ceiling of the mean."""
        micros = ceil(ask.micros * dp / alive)
        if micros not in paces:
            plan = replace(ask.plan, dp=alive, micros=micros)
            paces[micros] = answer.price.step / closed(replace(ask, plan=plan, micros=micros)).step
        return paces[micros]

    got = elastic(dp, mtbf * dp, repair, pause, answer.price.step, speed)
    return _told(answer, got, {"elastic": True, "repair_s": repair}, [
        f"a replica of {ask.plan.inner} devices is lost every {lasting(mtbf)} and back after {lasting(repair)}; the"
        f" rest go on with the same batch after {lasting(pause)}",
        "checkpoints, which only the loss of all replicas needs, are not counted",
    ])  # fmt: skip


def _told(answer: Answer, got: Goodput, more: dict[str, Any], reasons: list[str]) -> Told:
    days = answer.days / got.goodput if got.goodput else None
    facts = {
        "goodput": got.goodput, "mtbf_s": got.mtbf, "saving": got.saving, "lost": got.lost, "days": days,
        "failures_per_day": 86400.0 / got.mtbf,
    }  # fmt: skip
    head = f"goodput {share(got.goodput)}"
    if days is None:
        head = "the job never gets further: failures come before a checkpoint is written"
    elif answer.question.steps:
        head += (
            f": {days:.4g} days instead of {answer.days:.4g}, with {days * 86400 / got.mtbf:,.3g} failures"
        )
    return {"failures": facts | more}, "\n  ".join([f"failures   {head}", *reasons])
