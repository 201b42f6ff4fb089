"""Optimisers, schedules, and what happens between backward and step."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.library.catalogue import batches, loop
from unisono.library import Job

Step = Callable[[], object]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def trained(
    job: Job,
    model: nn.Module,
    optimizers: Sequence[Any],
    data: Any,
    before: Step = lambda: None,
    epochs: int = 1,
) -> Iterator[float]:
    for _ in range(epochs):
        for x, y in data:
            loss = F.cross_entropy(model(x), y)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            before()
            for optimizer in optimizers:
                optimizer.step()
            yield job.mean(loss)


@loop()
def two_optimisers(job: Job) -> Iterator[float]:
    """Body and head."""
    model = mlp()
    body = torch.optim.SGD(model[:4].parameters(), lr=0.1, momentum=0.9)
    head = torch.optim.AdamW(model[4].parameters(), lr=1e-2)
    model, (body, head), data = job.prepare(model, [body, head], batches())
    yield from trained(job, model, [body, head], data, epochs=2)


@loop()
def a_second_prepare(job: Job) -> Iterator[float]:
    model = mlp()
    body = torch.optim.SGD(model[:4].parameters(), lr=0.1)
    head = torch.optim.AdamW(model[4].parameters(), lr=1e-2)
    model, body, data = job.prepare(model, body, batches())
    model, head = job.prepare(model, head)
    yield from trained(job, model, [body, head], data)


@loop(shard="refused J19")
def an_optimiser_that_is_not_prepared(job: Job) -> Iterator[float]:
    model = mlp()
    body = torch.optim.SGD(model[:4].parameters(), lr=0.1)
    head = torch.optim.AdamW(model[4].parameters(), lr=1e-2)
    model, body, data = job.prepare(model, body, batches())
    yield from trained(job, model, [body, head], data)


@loop(near=2e-2)
def muon_and_adamw(job: Job) -> Iterator[float]:
    """Muon rounds to bfloat16 inside, which makes one rounding of a gradient large."""
    model = mlp()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    muon = torch.optim.Muon(matrices, lr=1e-2)
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.dim() < 2], lr=1e-2)
    del matrices
    model, (muon, adamw), data = job.prepare(model, [muon, adamw], batches())
    yield from trained(job, model, [muon, adamw], data)


@loop()
def groups_and_a_schedule(job: Job) -> Iterator[float]:
    model = mlp()
    groups: list[Any] = [{"params": model[:4].parameters(), "lr": 0.2}, {"params": model[4].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.2, 0.1], total_steps=10)
    model, optimizer, data = job.prepare(model, optimizer, batches())
    yield from trained(job, model, [optimizer], data, before=schedule.step, epochs=2)


@loop()
def clipping_by_torch(job: Job) -> Iterator[float]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, data = job.prepare(model, optimizer, batches())
    yield from trained(
        job, model, [optimizer], data, lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    )


@loop()
def clipping_by_the_job(job: Job) -> Iterator[float]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, data = job.prepare(model, optimizer, batches())
    yield from trained(job, model, [optimizer], data, lambda: job.clip(0.1))


@loop(shard="told J15")
def clipping_a_list_made_before(job: Job) -> Iterator[float]:
    model = mlp()
    known = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, data = job.prepare(model, optimizer, batches())
    yield from trained(job, model, [optimizer], data, lambda: nn.utils.clip_grad_norm_(known, 0.1))


@loop(shard="refused J05")
def lbfgs(job: Job) -> Iterator[float]:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
    model, optimizer, data = job.prepare(model, optimizer, batches())
    for x, y in data:

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)  # noqa: B023
            loss.backward()
            return torch.tensor(job.mean(loss))

        yield float(optimizer.step(closure))


@loop()
def updates_by_hand(job: Job) -> Iterator[float]:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = job.prepare(model, optimizer, batches())
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad
        yield job.mean(loss)


def accumulated(job: Job, said: bool) -> Iterator[float]:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, data = job.prepare(model, optimizer, batches(size=5))
    for number, (x, y) in enumerate(data):
        loss = F.cross_entropy(model(x), y) / 2
        if number % 2 or not said:
            loss.backward()
        else:
            with job.accumulate():
                loss.backward()
        yield job.mean(loss)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


@loop()
def accumulation(job: Job) -> Iterator[float]:
    yield from accumulated(job, False)


@loop()
def accumulation_that_saves_messages(job: Job) -> Iterator[float]:
    yield from accumulated(job, True)


@loop(near=1e-2)
def amp_with_a_scaler(job: Job) -> Iterator[float]:
    model = mlp().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)
    model, optimizer, data = job.prepare(model, optimizer, batches())
    for _ in range(3):
        for x, y in data:
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(model(x.float()), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            yield job.mean(loss)


@loop()
def thawed_later(job: Job) -> Iterator[float]:
    model = mlp()
    model[:4].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, data = job.prepare(model, optimizer, batches())
    yield from trained(job, model, [optimizer], data)
    model.requires_grad_(True)
    yield from trained(job, model, [optimizer], data)


@loop()
def thawed_as_a_new_group(job: Job) -> Iterator[float]:
    model = mlp()
    model[:4].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[4].parameters(), lr=1e-2)
    model, optimizer, data = job.prepare(model, optimizer, batches())
    yield from trained(job, model, [optimizer], data)
    model.requires_grad_(True)
    optimizer.add_param_group({"params": list(model[:4].parameters()), "lr": 1e-3})
    yield from trained(job, model, [optimizer], data)


@loop()
def frozen_midway(job: Job) -> Iterator[float]:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    model, optimizer, data = job.prepare(model, optimizer, batches())
    yield from trained(job, model, [optimizer], data)
    model[0].requires_grad_(False)
    yield from trained(job, model, [optimizer], data)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Any:
        return self.head(checkpoint(self.block, self.stem(x), use_reentrant=self.reentrant))


@loop()
def gradient_checkpointing(job: Job) -> Iterator[float]:
    for reentrant in (False, True):
        model = Checkpointed(reentrant)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, data = job.prepare(model, optimizer, batches())
        yield from trained(job, model, [optimizer], data)


class Parts(nn.Module):
    """A weight used twice, a part that no batch reaches, and one that only some reach."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out, self.twin = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 6)
        self.twin.weight = self.body.weight
        self.never, self.sometimes = nn.Linear(6, 3), nn.Linear(6, 6)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.twin(self.body(x).tanh()).tanh()
        return self.out(x + self.sometimes(x) if self.calls % 2 else x)


@loop()
def tied_and_unused_weights(job: Job) -> Iterator[float]:
    model = Parts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    model, optimizer, data = job.prepare(model, optimizer, batches())
    yield from trained(job, model, [optimizer], data, epochs=2)
