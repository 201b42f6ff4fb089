"""Where batches come from, and in which order they are used."""

import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset, Sampler, WeightedRandomSampler

from tests.library.catalogue import batches, loop, samples
from unisono.library import Job


def lstm_model() -> nn.Module:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.LSTM(2, 8, num_layers=2, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.cell(x.view(len(x), 3, 2))[0][:, -1])

    return Words()


def ready(job: Job, *data: Any) -> Any:
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    return job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), *data)


def step(job: Job, model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> float:
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return job.mean(loss)


@loop()
def lstm(job: Job) -> Iterator[float]:
    model = lstm_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, data = job.prepare(model, optimizer, batches())
    for x, y in data:
        yield step(job, model, optimizer, x, y)


@loop()
def look_ahead(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job, batches())
    for _ in range(2):
        coming = iter(data)
        batch = next(coming, None)
        while batch is not None:
            after = next(coming, None)
            yield step(job, model, optimizer, *batch)
            batch = after


@loop(four="told J11")
def look_ahead_that_copies(job: Job) -> Iterator[float]:
    """As a prefetcher to a device does. On four ranks some have two samples of each batch, of unlike weights."""
    model, optimizer, data = ready(job, batches())
    coming = ([part.clone() for part in batch] for batch in data)
    batch = next(coming, None)
    while batch is not None:
        after = next(coming, None)
        yield step(job, model, optimizer, *batch)
        batch = after


@loop("refused J11")
def zipped_in_one_backward(job: Job) -> Iterator[float]:
    model, optimizer, one, other = ready(job, batches(size=7), batches(samples(20), size=5))
    for (x, y), (u, v) in zip(one, other, strict=False):
        loss = F.cross_entropy(model(x), y) + F.cross_entropy(model(u), v)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield job.mean(loss)


@loop()
def zipped_with_two_backwards(job: Job) -> Iterator[float]:
    model, optimizer, one, other = ready(job, batches(size=7), batches(samples(20), size=5))
    for (x, y), (u, v) in zip(one, other, strict=False):
        optimizer.zero_grad()
        first = F.cross_entropy(model(x), y)
        first.backward()
        second = F.cross_entropy(model(u), v)
        second.backward()
        optimizer.step()
        yield job.mean(second)


@loop()
def validation_between_fetch_and_backward(job: Job) -> Iterator[float]:
    model, optimizer, train, val = ready(job, batches(size=7), batches(samples(10), size=4))
    for x, y in train:
        with torch.no_grad():
            yield sum(job.mean(F.cross_entropy(model(u), v)) for u, v in val)
        yield step(job, model, optimizer, x, y)


@loop()
def validation_between_forward_and_backward(job: Job) -> Iterator[float]:
    model, optimizer, train, val = ready(job, batches(size=7), batches(samples(10), size=4))
    for x, y in train:
        loss = F.cross_entropy(model(x), y)
        model.eval()
        with torch.no_grad():
            yield sum(job.mean(F.cross_entropy(model(u), v)) for u, v in val)
        model.train()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield job.mean(loss)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(samples())


@loop()
def iterable_data_set(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job, batches(Stream()))
    for _ in range(2):
        for x, y in data:
            yield step(job, model, optimizer, x, y)


class Drawn:
    """Batches that a generator of the user's draws."""

    def __iter__(self) -> Iterator[Any]:
        x, y = samples().tensors
        for _ in range(3):
            rows = torch.randint(len(x), (7,))
            yield {"x": x[rows], "y": y[rows]}


@loop()
def batches_drawn_by_hand(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job, Drawn())
    for batch in data:
        yield step(job, model, optimizer, batch["x"], batch["y"])


@loop()
def whole_batches_on_every_rank(job: Job) -> Iterator[float]:
    """No data is prepared: every rank computes the same."""
    model, optimizer = ready(job)
    x, y = samples().tensors
    for _ in range(3):
        rows = torch.randperm(len(x))[:8]
        yield step(job, model, optimizer, x[rows], y[rows])


class Alternating(Sampler[int]):
    """A sampler of the user's own, with epochs."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.epoch))
        return iter(order.tolist())

    def __len__(self) -> int:
        return self.count


@loop()
def sampler_of_ones_own(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job, batches(sampler=Alternating(21)))
    for epoch in range(2):
        data.sampler.set_epoch(epoch)
        for x, y in data:
            yield step(job, model, optimizer, x, y)


@loop()
def weighted_sampler(job: Job) -> Iterator[float]:
    sampler = WeightedRandomSampler([float(i % 3 + 1) for i in range(21)], 21)
    model, optimizer, data = ready(job, batches(sampler=sampler))
    for _ in range(2):
        for x, y in data:
            yield step(job, model, optimizer, x, y)


@loop()
def steps_that_leave_a_pass_early(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job, batches(shuffle=True))
    for _ in range(3):
        for number, (x, y) in enumerate(data):
            if number == 2:
                break
            yield step(job, model, optimizer, x, y)


@loop()
def weights_of_samples(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job, batches())
    for x, y in data:
        importance = x[:, 0].abs()
        loss = (importance * F.cross_entropy(model(x), y, reduction="none")).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield job.mean(loss)


@loop(
    "told J16", shard="told J13 J16"
)  # ranks on threads share Python's generator: while one is in its forward, others draw
def choices_of_the_loop(job: Job) -> Iterator[float]:
    random.seed(1)
    model, optimizer, data = ready(job, batches(size=4, drop_last=True))
    for x, y in data:
        if random.random() < 0.5:
            yield step(job, model, optimizer, x, y)
        else:
            yield step(job, model, optimizer, -x, y)
