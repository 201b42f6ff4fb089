"""Control flow: how often, how deep, when to stop, and by what it is decided."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.library.catalogue import batches, loop
from tests.library.catalogue.plain import adam, mlp, ready, sgd, step, trained
from unisono.library import Job


@loop()
def accumulate_with_continue(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job, size=4)
    for number, (x, y) in enumerate(data):
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
        yield job.mean(loss)
        if number % 2 == 0:
            continue
        optimizer.step()
        optimizer.zero_grad()


@loop()
def partial_window_at_the_end(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job, size=4)
    for number, (x, y) in enumerate(data, start=1):
        loss = F.cross_entropy(model(x), y) / 4
        loss.backward()
        yield job.mean(loss)
        if number % 4 == 0 or number == len(data):
            optimizer.step()
            optimizer.zero_grad()


@loop()
def forgotten_step_after_accumulate(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job, size=4)
    for number, (x, y) in enumerate(data):
        with job.accumulate():
            loss = F.cross_entropy(model(x), y)
            loss.backward()
        yield job.mean(loss)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


@loop()
def eval_mode_in_the_middle(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job, mlp(nn.BatchNorm1d(16)))
    for x, y in data:
        model.eval()
        with torch.no_grad():
            yield job.mean(F.cross_entropy(model(x), y))
        model.train()
        yield step(job, optimizer, F.cross_entropy(model(x), y))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        depth = 1 + int(x.sum().abs() * 10) % 3
        x = self.stem(x).tanh()
        for block in self.blocks[:depth]:
            x = x + block(x).tanh()
        return self.head(x)


@loop("silent", shard="open")
def depth_by_the_batch(job: Job) -> Iterator[float]:
    yield from trained(job, Deep())


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleDict({"a": nn.Linear(6, 3), "b": nn.Linear(6, 3)})

    def forward(self, x: Tensor) -> Tensor:
        rows = [self.ways["a" if row[0] > 0 else "b"](row) for row in x]
        return torch.stack(rows)


@loop(shard="open")
def module_dict_by_each_sample(job: Job) -> Iterator[float]:
    yield from trained(job, Chosen(), size=4)


class OneWay(Chosen):
    def forward(self, x: Tensor) -> Tensor:
        return self.ways["a" if x.mean() > 0 else "b"](x)


@loop("silent")
def way_by_the_mean_of_the_batch(job: Job) -> Iterator[float]:
    yield from trained(job, OneWay())


class Thinking(nn.Module):
    """Thinks again until all samples at hand are sure."""

    def __init__(self, sure: float) -> None:
        super().__init__()
        self.stem, self.cell, self.head = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.sure = sure

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(4):
            x = x + self.cell(x).tanh()
            if x.norm(dim=1).min() > self.sure:
                break
        return self.head(x)


@loop("silent")
def halting_by_the_slowest(job: Job) -> Iterator[float]:
    yield from trained(job, Thinking(1.6))


@loop()
def halting_never(job: Job) -> Iterator[float]:
    yield from trained(job, Thinking(float("inf")))


@loop("open")
def stop_early_on_local_loss(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job)
    for _ in range(6):
        for x, y in data:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.item()
            if loss.item() < 0.85:
                return


@loop("open")
def skip_bad_batches_by_local_loss(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job)
    for _ in range(2):
        for x, y in data:
            loss = F.cross_entropy(model(x), y)
            if loss.item() > 1.12:
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield job.mean(loss)


@loop("silent")
def zero_loss_for_bad_batches(job: Job) -> Iterator[float]:
    """Decided by the loss of the samples at hand, and all ranks still meet."""

    def loss(out: Tensor, y: Tensor) -> Tensor:
        value = F.cross_entropy(out, y)
        return value * 0 if value.item() > 1.12 else value

    yield from trained(job, loss=loss)


@loop("silent")
def rate_by_local_loss(job: Job) -> Iterator[float]:
    """A rate of each rank's own: ranks part."""
    model, optimizer, data = ready(job)
    for _ in range(2):
        for x, y in data:
            loss = F.cross_entropy(model(x), y)
            optimizer.param_groups[0]["lr"] = 0.1 * loss.item()
            yield step(job, optimizer, loss)


@loop("silent")
def clip_by_local_loss(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job)
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1 * loss.item())
        optimizer.step()
        yield job.mean(loss)


@loop("silent")
def plateau_per_batch_on_local_loss(job: Job) -> Iterator[float]:
    """A patience of none: the rate falls where a rank's own loss has not."""
    model, optimizer, data = ready(job)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for _ in range(2):
        for x, y in data:
            loss = F.cross_entropy(model(x), y)
            yield step(job, optimizer, loss)
            plateau.step(loss.item())


@loop()
def plateau_on_the_mean_loss(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for _ in range(2):
        for x, y in data:
            mean = step(job, optimizer, F.cross_entropy(model(x), y))
            plateau.step(mean)
            yield mean


@loop()
def plateau_on_local_loss(job: Job) -> Iterator[float]:
    """As most have it: once a pass, with a patience that is never used up here."""
    model, optimizer, data = ready(job)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=5)
    for _ in range(2):
        for x, y in data:
            loss = F.cross_entropy(model(x), y)
            yield step(job, optimizer, loss)
        plateau.step(loss.item())


@loop("silent", shard="open")
def updates_where_gradients_are_large(job: Job) -> Iterator[float]:
    """Every rank's copy of the model rolls back by a test of its own."""
    model, optimizer, data = ready(job)
    for _ in range(2):
        for x, y in data:
            kept = [p.detach().clone() for p in model.parameters()]
            loss = F.cross_entropy(model(x), y)
            yield step(job, optimizer, loss)
            with torch.no_grad():
                if F.cross_entropy(model(x), y) > loss.item() - 0.05:
                    for p, old in zip(model.parameters(), kept, strict=True):
                        p.copy_(old)


@loop("silent", shard="open")
def line_search_on_local_loss(job: Job) -> Iterator[float]:
    """Halves the step until the loss of the samples at hand has fallen by enough."""
    model, optimizer, data = ready(job, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1.0))
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        kept = [p.detach().clone() for p in model.parameters()]
        for rate in (4.0, 1.0, 0.25):
            optimizer.param_groups[0]["lr"] = rate
            with torch.no_grad():
                for p, old in zip(model.parameters(), kept, strict=True):
                    p.copy_(old)
            optimizer.step()
            with torch.no_grad():
                if F.cross_entropy(model(x), y) < loss.item() - 0.03:
                    break
        yield job.mean(loss)


@loop("silent")
def curriculum_by_local_loss(job: Job) -> Iterator[float]:
    """Samples above the threshold do not count, and the threshold follows the losses at hand."""
    bound = 1.2

    def loss(out: Tensor, y: Tensor) -> Tensor:
        nonlocal bound
        own = F.cross_entropy(out, y, reduction="none")
        bound = 0.5 * bound + 0.5 * own.max().item()
        return (own * (own.detach() < bound)).mean()

    yield from trained(job, loss=loss)


@loop()
def several_steps_a_batch(job: Job) -> Iterator[float]:
    """As PPO's epochs over what was gathered."""
    model, optimizer, data = ready(job)
    for x, y in data:
        for _ in range(2):
            yield step(job, optimizer, F.cross_entropy(model(x), y))


@loop("silent")
def minibatches_of_a_batch(job: Job) -> Iterator[float]:
    """The loop splits what it has been given: by halves of the rank's samples, not of all."""
    model, optimizer, data = ready(job)
    for x, y in data:
        for u, v in zip(x.split(4), y.split(4), strict=True):
            yield step(job, optimizer, F.cross_entropy(model(u), v))


@loop("silent")
def slices_by_rank_left_in(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job)
    for x, y in data:
        x, y = x[job.rank :: job.world], y[job.rank :: job.world]
        if len(x):
            yield step(job, optimizer, F.cross_entropy(model(x), y))


@loop("silent")
def the_first_half_of_the_batch(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job)
    for x, y in data:
        half = (len(x) + 1) // 2
        yield step(job, optimizer, F.cross_entropy(model(x[:half]), y[:half]))


@loop("silent")
def the_easiest_of_the_batch(job: Job) -> Iterator[float]:
    """Looked for without a gradient, trained on alone."""
    model, optimizer, data = ready(job)
    for x, y in data:
        with torch.no_grad():
            own = F.cross_entropy(model(x), y, reduction="none")
        rows = own.argsort()[: (len(x) + 1) // 2]
        yield step(job, optimizer, F.cross_entropy(model(x[rows]), y[rows]))


@loop("silent")
def samples_above_a_threshold(job: Job) -> Iterator[float]:
    """A mean over those that are left, another number on each rank."""
    model, optimizer, data = ready(job)
    for x, y in data:
        left = x[:, 0] > -0.5
        yield step(job, optimizer, F.cross_entropy(model(x[left]), y[left]))


@loop()
def zero_grad_keeps_zeros(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job, optimizer=adam)
    for x, y in data:
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        yield job.mean(loss)


@loop()
def never_zeroes(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job)
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        yield job.mean(loss)


@loop()
def two_losses_backward_list(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job)
    for x, y in data:
        out = model(x)
        losses = [F.cross_entropy(out, y), out.square().mean()]
        optimizer.zero_grad()
        torch.autograd.backward(losses)
        optimizer.step()
        yield job.mean(losses[0])


@loop()
def batches_cached_in_a_list(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job)
    kept = list(data)
    for _ in range(2):
        for x, y in kept:
            yield step(job, optimizer, F.cross_entropy(model(x), y))


@loop()
def stateful_lstm(job: Job) -> Iterator[float]:
    """The state of one step is the next one's, detached; batches of one size."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.LSTM(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor, state: Any) -> Any:
            out, state = self.cell(x[None], state)
            return self.head(out[0]), state

    words, state = Words(), None
    loader = batches(size=7)
    model, optimizer, data = job.prepare(words, sgd(words), loader)
    for x, y in data:
        out, state = model(x, state)
        state = tuple(s.detach() for s in state)
        yield step(job, optimizer, F.cross_entropy(out, y))
