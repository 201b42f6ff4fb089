"""What every learning-rate schedule owes: a pure function of the step, between nothing and the peak."""

from collections.abc import Iterator
from pathlib import Path

from unisono.spec.training import LearningRate


def faults(member: LearningRate, folder: Path, text: str = "") -> Iterator[str]:
    """What is wrong with a schedule, a sentence each: it warms up in a straight line, stays within 0 and the peak,
    gives the same when asked again, in any order, and does not go on after the last step."""
    warm = member.model_copy(update={"warmup_steps": 10})
    first = [warm.at(step, 101, 1.0) for step in range(120)]
    if first != [warm.at(step, 101, 1.0) for step in reversed(range(120))][::-1]:
        yield "asked again, it gives another learning rate"
    if any(abs(rate - (step + 1) / 10) > 1e-9 for step, rate in enumerate(first[:10])):
        yield "it does not warm up in a straight line"
    if not all(0.0 <= rate <= 1.0 + 1e-9 for rate in first):
        yield "it leaves the range from 0 to the peak"
    if len(set(first[100:])) > 1:
        yield "it goes on after the last step"
