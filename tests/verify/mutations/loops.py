"""Loops as users write them, in which bugs of the library way show. Ten samples a batch, dealt as they come."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from unisono.library import Job


def _net(*, batched: bool = False) -> nn.Module:
    middle = nn.BatchNorm1d(12) if batched else nn.LayerNorm(12)
    return nn.Sequential(nn.Linear(6, 12), middle, nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3))


def _ready(
    job: Job, model: nn.Module, batch: int = 10
) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
    drawn = torch.Generator().manual_seed(7)
    x = torch.randn(60, 6, generator=drawn)
    data = TensorDataset(x, torch.randint(3, (60,), generator=drawn))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return job.prepare(model, optimizer, DataLoader(data, batch_size=batch, shuffle=True))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def plain(job: Job) -> None:
    """Ten samples a batch: three ranks have three, three and four."""
    model, optimizer, data = _ready(job, _net())
    for x, y in data:
        _step(model, optimizer, x, y)


def even(job: Job) -> None:
    """Twelve samples a batch: as many on each of two, three or four ranks."""
    model, optimizer, data = _ready(job, _net(), 12)
    for x, y in data:
        _step(model, optimizer, x, y)


def batched(job: Job) -> None:
    """A norm in which samples meet."""
    model, optimizer, data = _ready(job, _net(batched=True), 12)
    for x, y in data:
        _step(model, optimizer, x, y)


def seeded_by_rank(job: Job) -> None:
    """A script that seeds each rank otherwise: weights become the first rank's."""
    torch.manual_seed(job.rank)
    even(job)


def accumulating(job: Job) -> None:
    """Two batches a step, of which none meets before the step."""
    model, optimizer, data = _ready(job, _net(), 12)
    for number, (x, y) in enumerate(data):
        with job.accumulate():
            (F.cross_entropy(model(x), y) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def clipped(job: Job) -> None:
    """Clipping that is always at work."""
    model, optimizer, data = _ready(job, _net(), 12)
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        job.clip(0.01)
        optimizer.step()


def padded(job: Job) -> None:
    """Some targets do not count, on some ranks more than on others."""
    model, optimizer, data = _ready(job, _net(), 12)
    for x, y in data:
        y = torch.where(x[:, 0] > 0.6, -100, y)
        job.weigh(float((y >= 0).sum()))
        _step(model, optimizer, x, y)


def looking_ahead(job: Job) -> None:
    """The next batch is fetched before this one is used: first 59 samples, then one, which one rank alone has."""
    model, optimizer, data = _ready(job, _net(), 59)
    for _ in range(2):
        coming = iter(data)
        batch = next(coming)
        while batch is not None:
            after = next(coming, None)
            _step(model, optimizer, *batch)
            batch = after
