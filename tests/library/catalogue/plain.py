"""The loop that most of the catalogue's loops are, with one thing changed."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.library.catalogue import batches
from unisono.library import Job

Loss = Callable[[Tensor, Tensor], Tensor]


def mlp(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), *between, nn.Linear(16, 3))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def each(out: Tensor, y: Tensor) -> Tensor:
    """The loss of each sample."""
    return F.cross_entropy(out, y, reduction="none")


def ready(job: Job, model: nn.Module | None = None, size: int = 8, optimizer: Any = sgd) -> Any:
    """Model, optimiser and data, prepared."""
    model = model or mlp()
    return job.prepare(model, optimizer(model), batches(size=size))


def step(job: Job, optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    """One update; returns the mean loss of the global batch."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return job.mean(loss)


def trained(
    job: Job,
    model: nn.Module | None = None,
    *,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    size: int = 8,
    seen: Callable[[Tensor], Tensor] = lambda x: x,
    loss: Loss = F.cross_entropy,
    first: Callable[[nn.Module], object] = lambda model: None,
    before: Callable[[nn.Module], object] = lambda model: None,
    after: Callable[[nn.Module], object] = lambda model: None,
    epochs: int = 2,
) -> Iterator[float]:
    """seen: of the samples, what the model sees. first: after `prepare`. before, after: around each update."""
    model, own, data = ready(job, model, size, optimizer)
    first(model)
    for _ in range(epochs):
        for x, y in data:
            value = loss(model(seen(x)), y)
            own.zero_grad()
            value.backward()
            before(model)
            own.step()
            after(model)
            yield job.mean(value)


def grads(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]
