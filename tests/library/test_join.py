"""Ranks with other numbers of batches: all end together, and the tail is a mean over those that still have data."""

from typing import Any

import pytest
import torch
from torch import nn

import unisono
from tests.ranks import World

pytestmark = pytest.mark.timeout(60)
BATCHES = (5, 3, 4)


def tail(ctx: Any) -> dict[str, Any]:
    """A model of one weight, whose gradient is the mean of its inputs: in each step what ranks held is read off it."""
    job = unisono.init("dp=3", context=ctx)
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    job.prepare(model, optimizer)
    batches = [torch.full((2, 1), float(10**job.rank), dtype=torch.float64) for _ in range(BATCHES[job.rank])]
    grads = []
    for (x,) in job.join([(x,) for x in batches]):
        model(x).mean().backward()
        optimizer.step()
        grads.append(float(model.weight.grad))  # type: ignore[arg-type]
        optimizer.zero_grad()
    return {"grads": grads}


def test_five_three_and_four_batches_end_without_a_hang(threads: World) -> None:
    want = [37.0, 37.0, 37.0, 50.5, 1.0]  # means of 1, 10, 100; of 1 and 100; of 1
    for rank in threads(tail, 3, group=False):
        assert rank["grads"] == pytest.approx(want, rel=1e-12)
