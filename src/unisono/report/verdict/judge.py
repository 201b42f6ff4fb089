"""One verdict out of all that costs time: a cause is named only if it explains most of what could be saved."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from unisono.report.verdict.causes import candidates
from unisono.report.verdict.costs import Candidate, CauseCase, said
from unisono.report.verdict.evidence import Prices, RunEvidence
from unisono.spec.words import listed, percent, seconds

TROUBLE = 0.1
"""Of a step: what costs less, or would be shortened by less, is no trouble."""
COVERS = 0.6
"""Of all visible cost, what a cause must make up to be named: two causes that are nearly as dear cannot be told apart
by one run."""
FEWEST = 8
"""Steps that a verdict takes: fewer are mostly luck."""
UNKNOWN = "cannot tell"
CORES = "cores"
_HEALTHY = ("compute", CORES, "memory bandwidth")
_PAIRED = (
    "communication",
    "small buckets",
    "straggler",
    "rotating stragglers",
    "pipeline bubble",
    "uneven stages",
)


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """What limited a stretch of a run.

    cause: one of the causes, `compute` where no change would save a tenth of a step, or `cannot tell`, and then
    `measure` says what would. sure: whether the cause makes up most of the visible cost, and more than noise. cost_s:
    seconds of a mean step that it takes; share: of a step; covers: of all visible cost. since_step, until_step: when.
    rank, phase, module: where; None, "" for all. evidence: figures in words. change: flags as typed, "" where no key
    changes it; advice: in words. gain_s: seconds of a step that the change would save, for as many samples; by: what
    that rests on. steps: the first and last that were looked at. others: the next causes, each with the same figures.
    """

    cause: str
    sure: bool
    sentence: str
    steps: tuple[int, int] = (0, 0)
    step_s: float = 0.0
    rank: int | None = None
    phase: str = ""
    module: str = ""
    since_step: int | None = None
    until_step: int | None = None
    cost_s: float = 0.0
    share: float = 0.0
    covers: float = 0.0
    evidence: tuple[str, ...] = ()
    change: str = ""
    advice: str = ""
    gain_s: float = 0.0
    by: str = ""
    measure: str = ""
    others: tuple[dict[str, Any], ...] = ()

    @property
    def trouble(self) -> bool:
        """Whether something beside computing limits the run, and is known."""
        return self.cause not in (*_HEALTHY, UNKNOWN)

    @property
    def said(self) -> str:
        """What to do, in a sentence or two: for people."""
        parts = [self.advice, f"Try {self.change}" if self.change else ""]
        if self.gain_s > 0:
            parts.append(
                f"It would save about {seconds(self.gain_s)} of a step of {seconds(self.step_s)} (by {self.by})"
            )
        parts.append(f"Measure {self.measure}" if self.measure else "")
        return " ".join(f"{part.rstrip('.')}." for part in parts if part)


def as_json(verdict: RunVerdict) -> dict[str, Any]:
    """The object that `ask` and `report --json` print."""
    return asdict(verdict) | {"trouble": verdict.trouble, "said": verdict.said}


def no_price(change: str) -> float | None:
    """Prices where there is no planner."""
    return None


def judge(evidence: RunEvidence, price: Prices = no_price) -> RunVerdict:
    """What limited the run, by these figures. price: of a change, by the planner; see `Prices`."""
    if evidence.error:
        return RunVerdict(
            UNKNOWN, False, f"The run ended with an error: {evidence.error}.", measure="a run without it"
        )
    numbers = evidence.numbers
    if not numbers or evidence.wall <= 0:
        what = "Nothing was measured, so nothing can be said about what limited this run."
        return RunVerdict(UNKNOWN, False, what, measure="a run with [out] report = true")
    every = candidates(evidence, price)
    every = _without_busy(evidence, every, price)
    visible = sum(each.cost for each in every)
    top = every[0] if every else None
    if top is None or not _is_trouble(evidence, top, price):
        return _healthy(evidence, every, price)
    if doubt := _doubt(evidence, every, visible, price):
        return _unknown(evidence, every, visible, doubt)
    return _named(evidence, every, visible, price)


def _is_trouble(evidence: RunEvidence, cause: Candidate, price: Prices) -> bool:
    """Whether a cause is worth a verdict: it takes a tenth of a step, and as much would be saved, if that is known. It
    is not, of a few steps."""
    least, known = TROUBLE * evidence.period, cause.gain != 0.0 and len(evidence.numbers) >= FEWEST
    return cause.cost >= least and (not known or _gain(evidence, cause, price)[0] >= least)


def _without_busy(evidence: RunEvidence, every: list[Candidate], price: Prices) -> list[Candidate]:
    """All but a machine that is busy with other programs, unless nothing else is any trouble: that makes everything
    that was measured longer, and no change to the run makes it shorter. Troubles come first."""
    every = sorted(every, key=lambda each: (not _is_trouble(evidence, each, price), -each.cost))
    rest = [each for each in every if each.cause != CORES or len(evidence.ranks) > evidence.cores > 0]
    return rest if rest and _is_trouble(evidence, rest[0], price) else every


def _doubt(
    evidence: RunEvidence, every: Sequence[Candidate], visible: float, price: Prices
) -> tuple[str, str] | None:
    """(why the dearest cause is not to be named, what to measure); None if it is."""
    top, steps = every[0], len(evidence.numbers)
    rivals = [each for each in every[1:] if _is_trouble(evidence, each, price)]
    if steps < FEWEST:
        return (
            f"{steps} steps are mostly luck",
            f"at least {2 * FEWEST} steps more: --train.steps {evidence.numbers[-1] + 2 * FEWEST}",
        )
    if not evidence.whole and top.cause in _PAIRED:
        return (
            "the events of some ranks are missing, and who waits for whom is in them",
            "with the events of all ranks",
        )
    noise = _noise(evidence)
    if top.cost < 2 * noise:
        return (
            f"{top.cause} takes {seconds(top.cost)} of a step, and the mean step is known to ± {seconds(2 * noise)}",
            "more steps, or on a quieter machine",
        )
    if top.cost < COVERS * visible and rivals and rivals[0].cost > 0.5 * top.cost:
        second = rivals[0]
        first = next((each for each in (top, second) if each.change), top)
        return (
            f"{top.cause} and {second.cause} cost about as much, {percent(top.cost / visible)} and "
            f"{percent(second.cost / visible)} of what could be saved",
            f"again with the one changed, then the other{f': {first.change}' if first.change else ''}",
        )
    return None


def _noise(evidence: RunEvidence) -> float:
    """The standard error of the mean step, in seconds: of the median rank, without what it waited for a core."""
    walls = [
        statistics.median(max(0.0, step.wall - step.beside.get("queue_s", 0.0)) for step in row)
        for row in evidence.rows
    ]
    return statistics.stdev(walls) / len(walls) ** 0.5 if len(walls) > 1 else 0.0


def _named(evidence: RunEvidence, every: Sequence[Candidate], visible: float, price: Prices) -> RunVerdict:
    top = every[0]
    gain, by = _gain(evidence, top, price)
    covers, who = top.cost / visible, _who(evidence, top)
    return RunVerdict(
        top.cause, covers >= COVERS and not top.measure, f"Limited by {who}: {top.evidence[0]}.", _steps(evidence),
        evidence.period,
        top.rank, top.phase, top.module,
        top.since if top.since is not None else evidence.numbers[0],
        top.until if top.until is not None else evidence.numbers[-1],
        top.cost, top.cost / evidence.period, covers, tuple(top.evidence), top.change, top.advice, gain, by,
        top.measure, _others(evidence, every[1:]),
    )  # fmt: skip


def _gain(evidence: RunEvidence, top: Candidate, price: Prices) -> tuple[float, str]:
    """(seconds of a step that the change saves, what that rests on): the planner's price where it knows the change and
    finds it better, but never more than the cause costs."""
    ratio = price(top.change) if top.change and top.priced else None
    if ratio is not None and ratio < 1:
        return min(top.cost, (1 - ratio) * evidence.period), "the planner's price"
    return top.gain, top.by


def _who(evidence: RunEvidence, top: Candidate) -> str:
    if top.rank is not None:
        name = next(rank.name for rank in evidence.ranks if rank.rank == top.rank)
        return f"{name}, in {top.module or top.phase}"
    named = {"input": "its input", "cores": f"this machine's cores, {evidence.cores} for {len(evidence.ranks)} ranks",
             "pipeline bubble": "the pipeline's bubble", "communication": f"communication on {top.phase}"}  # fmt: skip
    return named.get(top.cause, top.cause)


def _more_ranks(evidence: RunEvidence, price: Prices) -> tuple[str, float]:
    """(twice the replicas, as typed, seconds of a step that they save by the planner's price); ("", 0) where they save
    nothing: ranks of one host share its cores."""
    change = said(CauseCase(evidence, price), {"dp": 2 * evidence.size("dp")})
    ratio = price(change)
    return (change, (1 - ratio) * evidence.period) if ratio is not None and ratio < 1 - TROUBLE else ("", 0.0)


def _healthy(evidence: RunEvidence, every: Sequence[Candidate], price: Prices) -> RunVerdict:
    compute = sum(evidence.part(part) for part in ("forward", "backward", "optim")) / evidence.period
    rows = [f"compute {percent(compute)} of a step"]
    rows += [
        f"{each.cause} {percent(each.cost / evidence.period)}"
        for each in every[:3]
        if each.cost >= 0.01 * evidence.period
    ]
    steps, (change, gain) = _steps(evidence), _more_ranks(evidence, price)
    return RunVerdict(
        "compute", len(evidence.numbers) >= FEWEST, f"Limited by compute: {', '.join(rows)}.", steps, evidence.period,
        since_step=steps[0], until_step=steps[1], cost_s=compute * evidence.period, share=compute, covers=1.0,
        evidence=tuple(rows), change=change, gain_s=gain, by="the planner's price" if change else "",
        advice="Nothing else saves a tenth of a step. More ranks or faster ones make it shorter",
        others=_others(evidence, every),
    )  # fmt: skip


def _unknown(
    evidence: RunEvidence, every: Sequence[Candidate], visible: float, doubt: tuple[str, str]
) -> RunVerdict:
    steps, (why, measure) = _steps(evidence), doubt
    return RunVerdict(
        UNKNOWN, False, f"What limits this run cannot be said: {why}.", steps, evidence.period,
        since_step=steps[0], until_step=steps[1], cost_s=every[0].cost, share=every[0].cost / evidence.period,
        covers=every[0].cost / visible,
        evidence=tuple(row for each in every[:2] for row in each.evidence), measure=measure,
        others=_others(evidence, every),
    )  # fmt: skip


def _steps(evidence: RunEvidence) -> tuple[int, int]:
    return evidence.numbers[0], evidence.numbers[-1]


def _others(evidence: RunEvidence, rest: Sequence[Candidate]) -> tuple[dict[str, Any], ...]:
    """The next causes that cost a hundredth of a step or more, four at most."""
    return tuple(
        {
            "cause": each.cause, "cost_s": each.cost, "share": each.cost / evidence.period, "rank": each.rank,
            "evidence": list(each.evidence), "change": each.change, "gain_s": each.gain,
        }
        for each in rest[:4]
        if each.cost >= 0.01 * evidence.period
    )  # fmt: skip


def in_words(verdict: RunVerdict) -> str:
    """The verdict on a few lines, for a terminal."""
    rows = [
        verdict.sentence,
        *(f"  {row}" for row in verdict.evidence if row not in verdict.sentence),
        verdict.said,
    ]
    if verdict.others:
        rest = [f"{each['cause']} {percent(each['share'])}" for each in verdict.others]
        rows.append(f"Beside it: {listed(rest)} of a step.")
    return "\n".join(row for row in rows if row)
