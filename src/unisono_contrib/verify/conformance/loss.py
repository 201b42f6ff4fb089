"""What every loss owes: it is a sum over targets, so that micro-batches and shards add up."""

from collections.abc import Iterator
from pathlib import Path

import torch

from unisono.spec.training import Loss


def faults(member: Loss, folder: Path, text: str = "") -> Iterator[str]:
    """What is wrong with a loss, a sentence each: one number, the parts' sum, for rows and for sequences alike, with a
    gradient."""
    generator, loss = torch.Generator().manual_seed(0), member.bind()
    logits = torch.randn(6, 4, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(7, (6, 4), generator=generator)
    whole = loss(logits, targets)
    if whole.shape != ():
        yield f"it gives a tensor of shape {tuple(whole.shape)}, not one number"
        return
    if not torch.isclose(whole, loss(logits[:2], targets[:2]) + loss(logits[2:], targets[2:])):
        yield "of two parts of a batch it does not add up to that of the batch: it is no sum over targets"
    if not torch.isclose(whole, loss(logits.flatten(0, 1), targets.flatten())):
        yield "it is another over rows than over sequences of them"
    if not whole.requires_grad:
        yield "it has no gradient"
