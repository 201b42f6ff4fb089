"""The plan: how a run is spread over devices. Names and options only, no live parts, no torch."""

from unisono.plan.grammar import Choice, choice
from unisono.plan.plan import Batch, Plan

__all__ = ["Batch", "Choice", "Plan", "choice"]
