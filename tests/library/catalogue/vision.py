"""Pictures: batch norm, mixing, averages of weights, augmentation."""

import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset

from tests.library.catalogue import batches, loop
from unisono.library import Job


def convnet() -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


def mlp(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), *between, nn.Linear(16, 3))


@loop()
def cnn_with_batchnorm(job: Job) -> Iterator[float]:
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, data = job.prepare(model, optimizer, batches(shuffle=True))
    for _ in range(2):
        for x, y in data:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield job.mean(loss)


@loop()
def label_smoothing(job: Job) -> Iterator[float]:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, data = job.prepare(model, optimizer, batches())
    for x, y in data:
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield job.mean(loss)


@loop("told J13")
def dropout(job: Job) -> Iterator[float]:
    model = mlp(nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = job.prepare(model, optimizer, batches())
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield job.mean(loss)


@loop("told J10 J12")
def mixup(job: Job) -> Iterator[float]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = job.prepare(model, optimizer, batches())
    for x, y in data:
        share, order = torch.distributions.Beta(0.4, 0.4).sample().item(), torch.randperm(len(x))
        out = model(share * x + (1 - share) * x[order])
        loss = share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[order])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield job.mean(loss)


def mixed(rows: list[Any]) -> Any:
    x, y = (torch.stack(parts) for parts in zip(*rows, strict=True))
    return x * 0.7 + x.flip(0) * 0.3, y, y.flip(0)


class Augmented(Dataset):
    """Draws from all three generators, as transforms do."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> Any:
        x, y = self.data[i]
        return x + 0.1 * torch.randn(6) * random.random() + 0.1 * np.random.rand(), y


def augmented(job: Job, workers: int) -> Iterator[float]:
    from tests.library.catalogue import samples

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = batches(Augmented(samples()), shuffle=True, num_workers=workers)
    model, optimizer, data = job.prepare(model, optimizer, loader)
    for _ in range(2):
        for x, y in data:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield job.mean(loss)


@loop()
def augmentation_in_the_data_set(job: Job) -> Iterator[float]:
    yield from augmented(job, 0)


@loop("told J12")
def augmentation_in_the_loop(job: Job) -> Iterator[float]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = job.prepare(model, optimizer, batches())
    for x, y in data:
        loss = F.cross_entropy(model(x + 0.1 * torch.randn_like(x)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield job.mean(loss)


@loop()
def augmentation_by_the_generator(job: Job) -> Iterator[float]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = job.prepare(model, optimizer, batches())
    for x, y in data:
        loss = F.cross_entropy(model(x + 0.1 * job.generator.randn_like(x)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield job.mean(loss)


def averaged(job: Job, model: nn.Module) -> Iterator[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = job.prepare(model, optimizer, batches())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=False)
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        average.eval()
        with torch.no_grad():
            yield job.mean(F.cross_entropy(average(x), y))


@loop()
def ema(job: Job) -> Iterator[float]:
    yield from averaged(job, mlp())


@loop()
def ema_of_batchnorm(job: Job) -> Iterator[float]:
    yield from averaged(job, convnet())


@loop()
def ema_by_hand(job: Job) -> Iterator[float]:
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = job.prepare(model, optimizer, batches())
    average = deepcopy(model).eval()
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                mean.mul_(0.9).add_(p, alpha=0.1)
            yield job.mean(F.cross_entropy(average(x), y))


@loop()
def swa(job: Job) -> Iterator[float]:
    """Statistics of the averaged model's batch norms are made anew, over the data."""
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = job.prepare(model, optimizer, batches())
    average = AveragedModel(model)
    for _ in range(2):
        for x, y in data:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield job.mean(loss)
        average.update_parameters(model)
    torch.optim.swa_utils.update_bn(data, average)
    average.eval()
    for x, y in data:
        with torch.no_grad():
            yield job.mean(F.cross_entropy(average(x), y))


class Teacher(nn.Module):
    """A buffer that its forward moves by the samples that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 3)
        self.centre: Tensor
        self.register_buffer("centre", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x - self.centre)
        with torch.no_grad():
            self.centre.lerp_(x.mean(0), 0.5)
        return out


def centred(job: Job, agree: bool) -> Iterator[float]:
    model = Teacher()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = job.prepare(model, optimizer, batches())
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        if agree:
            model.centre.copy_(job.mean(model.centre))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield job.mean(loss)


@loop("told J14 J10")
def buffer_moved_in_forward(job: Job) -> Iterator[float]:
    yield from centred(job, False)


@loop()
def buffer_moved_and_agreed(job: Job) -> Iterator[float]:
    yield from centred(job, True)
