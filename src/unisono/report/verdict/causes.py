"""Each thing that can make a step longer than it need be: what it costs by the figures, and what to change.

A function a cause: it reads the evidence and returns what it costs in seconds of a mean step, or None where the figures
say nothing of it. No cost is counted under two causes.
"""

from unisono.report.verdict.between_ranks import BETWEEN
from unisono.report.verdict.costs import Candidate, CauseCase
from unisono.report.verdict.evidence import Prices, RunEvidence
from unisono.report.verdict.on_ranks import ON_RANKS


def candidates(evidence: RunEvidence, price: Prices) -> list[Candidate]:
    """All causes that cost anything, the dearest first."""
    case = CauseCase(evidence, price)
    every = (cause(case) for cause in (*BETWEEN, *ON_RANKS))
    return sorted((each for each in every if each is not None and each.cost > 0), key=lambda each: -each.cost)
