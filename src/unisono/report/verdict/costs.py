"""What a cause of lost time is made of: what it costs, by which figures, and what to change."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from unisono.report.verdict.evidence import Prices, RunEvidence
from unisono.spec.words import percent, seconds


@dataclass(frozen=True, slots=True)
class Candidate:
    """What one cause takes of a step. cost: seconds of a mean step. gain: seconds that the change would save of it.
    change: flags as typed, or "" where no key changes it. advice: in words. by: what the gain rests on."""

    cause: str
    cost: float
    gain: float = 0.0
    change: str = ""
    advice: str = ""
    evidence: Sequence[str] = ()
    by: str = "the part measured"
    phase: str = ""
    module: str = ""
    rank: int | None = None
    since: int | None = None
    until: int | None = None
    measure: str = ""
    priced: bool = False  # whether the planner's price of the change is worth more than the gain here


@dataclass(frozen=True, slots=True)
class CauseCase:
    """What causes look at: the figures, and the planner's prices if there are any."""

    evidence: RunEvidence
    price: Prices


def said(case: CauseCase, words: Mapping[str, str | int]) -> str:
    """The flag that sets words of the plan: the others stay as they are."""
    plan = {**case.evidence.plan, **{key: str(value) for key, value in words.items()}}
    return '--plan "' + " ".join(f"{key}={value}" for key, value in plan.items()) + '"'


def share(case: CauseCase, cost: float) -> str:
    return f"{seconds(cost)} of a step of {seconds(case.evidence.period)} ({percent(cost / case.evidence.period)})"


def called(evidence: RunEvidence) -> bool:
    return bool(evidence.setting("callbacks", "call"))


def mean(values: Iterable[float]) -> float:
    every = list(values)
    return statistics.fmean(every) if every else 0.0
