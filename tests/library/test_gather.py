"""`job.gather`: a loss of the gathered rows has the gradients that it has on one device."""

from typing import Any

import pytest
import torch
from torch import nn

import unisono
from tests.ranks import World


def trained(ctx: Any, plan: str | None, batch: int) -> list[list[float]]:
    """Weights after two steps of a loss that compares all samples, those of batches that do not divide among them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    data: Any = torch.randn(2 * batch + 1, 3, dtype=torch.float64).split(batch)
    job = None
    if plan is not None:
        job = unisono.init(plan, context=ctx)
        model, optimizer, data = job.prepare(model, optimizer, data)
    for x in data:
        optimizer.zero_grad()
        rows = model(x) if job is None else job.gather(model(x))
        whole = rows @ rows.T
        (whole.logsumexp(-1) - whole.diagonal() + rows.std()).sum().backward()
        optimizer.step()
    state = model.state_dict() if job is None else job.weights(model)
    return [state[name].flatten().tolist() for name in sorted(state)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("plan", "ranks"), [("dp=2", 2), ("dp=3", 3), ("shard=2", 2)])
@pytest.mark.parametrize("batch", [4, 5])
def test_weights_are_those_of_one_device(threads: World, plan: str, ranks: int, batch: int) -> None:
    """Parts of 2 and 3 samples, and in the last batch one sample that a rank has and others borrow."""
    (want,) = threads(trained, 1, group=False, plan=None, batch=batch)
    for got in threads(trained, ranks, group=False, plan=plan, batch=batch):
        for mine, theirs in zip(got, want, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-12)


def means(ctx: Any, plan: str | None) -> list[Any]:
    """Of batches of 5 and of 1 sample: a mean as a tensor, and as a number."""
    model: Any = nn.Linear(3, 1).double()
    data: Any = torch.arange(18, dtype=torch.float64).view(6, 3).square().split(5)
    job = unisono.init(plan, context=ctx)
    _, _, data = job.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data)
    told: list[Any] = []
    for x in data:
        model(x)
        told.append([job.mean(x.mean(0)).tolist(), job.mean(x.mean())])
    return told


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("plan", "ranks"), [("dp=2", 2), ("dp=3", 3)])
def test_a_mean_is_of_all_samples_however_many_a_rank_has(threads: World, plan: str, ranks: int) -> None:
    """As a tensor as for a number; a borrowed sample counts nothing."""
    whole = torch.arange(18, dtype=torch.float64).view(6, 3).square()
    for told in threads(means, ranks, group=False, plan=plan):
        for (tensor, number), rows in zip(told, (whole[:5], whole[5:]), strict=True):
            assert tensor == pytest.approx(rows.mean(0).tolist()) and number == pytest.approx(
                float(rows.mean())
            )
