"""What every metric owes: counts that add up over micro-batches and ranks."""

import math
from collections.abc import Iterator
from pathlib import Path

import torch

from unisono.spec.training import Metric


def faults(member: Metric, folder: Path, text: str = "") -> Iterator[str]:
    """What is wrong with a metric, a sentence each: counts of parts add up, and its value is a number."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 4, 7, generator=generator, dtype=torch.float64)
    targets = torch.randint(7, (6, 4), generator=generator)
    whole = float(member.count(logits, targets))
    parts = float(member.count(logits[:2], targets[:2])) + float(member.count(logits[2:], targets[2:]))
    if not math.isclose(whole, parts, abs_tol=1e-9):
        yield "its counts of two parts of a batch do not add up to that of the batch"
    if not all(math.isfinite(member.value(whole / 24, loss)) for loss in (0.0, 2.0, 1e4)):
        yield "its value is no number"
