"""Optimisers of one's own, their states, schedules, clipping, and data of several kinds."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from tests.library.catalogue import batches, loop, samples
from tests.library.catalogue.plain import adam, mlp, ready, sgd, step, trained
from unisono.library import Job


@loop()
def clip_value_by_torch(job: Job) -> Iterator[float]:
    yield from trained(job, before=lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.02))


@loop()
def clip_head_alone(job: Job) -> Iterator[float]:
    yield from trained(job, before=lambda m: nn.utils.clip_grad_norm_(m[2].parameters(), 0.05))  # type: ignore[index]


@loop()
def one_cycle_by_len_of_loader(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, epochs=2, steps_per_epoch=len(data))
    for _ in range(2):
        for x, y in data:
            yield step(job, optimizer, F.cross_entropy(model(x), y))
            schedule.step()


@loop()
def swapped_optimiser(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job)
    for number in range(2):
        if number == 1:
            optimizer = adam(model)
            model, optimizer = job.prepare(model, optimizer)
        for x, y in data:
            yield step(job, optimizer, F.cross_entropy(model(x), y))


@loop(shard="open")
def rolled_back_by_state_dict(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job, optimizer=adam)
    for number, (x, y) in enumerate(data):
        if number == 1:
            kept = deepcopy(model.state_dict()), deepcopy(optimizer.state_dict())
        yield step(job, optimizer, F.cross_entropy(model(x), y))
        if number == 1:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])


@loop(shard="open")
def whole_state_dict_loaded_mid_run(job: Job) -> Iterator[float]:
    torch.manual_seed(9)
    other = mlp().state_dict()
    model, optimizer, data = ready(job)
    for number, (x, y) in enumerate(data):
        if number == 1:
            model.load_state_dict(other)
        yield step(job, optimizer, F.cross_entropy(model(x), y))


@loop()
def optimizer_state_cleared(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job, optimizer=adam)
    for number, (x, y) in enumerate(data):
        if number == 1:
            optimizer.state.clear()
        yield step(job, optimizer, F.cross_entropy(model(x), y))


class Lars(torch.optim.Optimizer):
    """By the norms of weight and gradient (You et al., 2017); floats: with `.item()` of them."""

    def __init__(self, params: Any, floats: bool = False) -> None:
        super().__init__(params, {"lr": 1.0, "floats": floats})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if group["floats"]:
                    size = p.data.view(-1).norm().item() / (p.grad.view(-1).norm().item() + 1e-9)
                else:
                    size = p.norm() / (p.grad.norm() + 1e-9)
                p.sub_(0.02 * size * p.grad)


@loop(shard="open")
def own_lars(job: Job) -> Iterator[float]:
    yield from trained(job, optimizer=lambda model: Lars(model.parameters()))


@loop(shard="open")
def own_lars_with_floats(job: Job) -> Iterator[float]:
    yield from trained(job, optimizer=lambda model: Lars(model.parameters(), floats=True))


@loop(shard="open", near=1e-7)
def adafactor(job: Job) -> Iterator[float]:
    yield from trained(job, optimizer=lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2))


@loop(near=2e-2, shard="open")
def torch_muon(job: Job) -> Iterator[float]:
    model = nn.Linear(6, 3, bias=False)
    yield from trained(job, model, optimizer=lambda model: torch.optim.Muon(model.parameters(), lr=1e-2))


@loop(shard="open")
def rprop(job: Job) -> Iterator[float]:
    yield from trained(job, optimizer=lambda model: torch.optim.Rprop(model.parameters(), lr=1e-2))


@loop()
def nadam_and_radam(job: Job) -> Iterator[float]:
    yield from trained(job, optimizer=lambda model: torch.optim.NAdam(model.parameters(), lr=1e-2))
    yield from trained(job, optimizer=lambda model: torch.optim.RAdam(model.parameters(), lr=1e-2))


@loop()
def foreach_and_fused(job: Job) -> Iterator[float]:
    for way in ({"foreach": True}, {"fused": True}):
        yield from trained(
            job,
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, **way),  # noqa: B023
        )


@loop()
def asgd_with_averages(job: Job) -> Iterator[float]:
    yield from trained(job, optimizer=lambda model: torch.optim.ASGD(model.parameters(), lr=0.1, t0=2))


@loop(shard="open")
def lookahead_optimizer(job: Job) -> Iterator[float]:
    """Slow weights follow fast ones every two steps (Zhang et al., 2019)."""
    model, optimizer, data = ready(job)
    slow = [p.detach().clone() for p in model.parameters()]
    number = 0
    for _ in range(2):
        for x, y in data:
            yield step(job, optimizer, F.cross_entropy(model(x), y))
            number += 1
            if number % 2 == 0:
                with torch.no_grad():
                    for p, s in zip(model.parameters(), slow, strict=True):
                        s.lerp_(p, 0.5)
                        p.copy_(s)


@loop(shard="open")
def schedule_free_by_hand(job: Job) -> Iterator[float]:
    """An average of the iterates, on which nothing depends."""
    model, optimizer, data = ready(job)
    mean = [p.detach().clone() for p in model.parameters()]
    for number, (x, y) in enumerate(data, start=2):
        yield step(job, optimizer, F.cross_entropy(model(x), y))
        for m, p in zip(mean, model.parameters(), strict=True):
            m.lerp_(p.detach(), 1 / number)


@loop(shard="open")
def weights_clamped(job: Job) -> Iterator[float]:
    """As in the first WGAN."""

    def clamp(model: nn.Module) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.2, 0.2)

    yield from trained(job, after=clamp)


@loop(shard="open")
def columns_of_unit_norm(job: Job) -> Iterator[float]:
    def unit(model: nn.Module) -> None:
        with torch.no_grad():
            weight = model[0].weight  # type: ignore[index]
            weight.div_(weight.norm(dim=1, keepdim=True))

    yield from trained(job, after=unit)


@loop(shard="open")
def pruned_by_magnitude(job: Job) -> Iterator[float]:
    def prune(model: nn.Module) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_((p.abs() > 0.05).to(p.dtype))

    yield from trained(job, after=prune)


@loop(shard="open")
def own_momentum_outside_of_the_optimiser(job: Job) -> Iterator[float]:
    kept: dict[int, Tensor] = {}

    def move(model: nn.Module) -> None:
        for number, p in enumerate(model.parameters()):
            if p.grad is not None:
                kept[number] = p.grad.clone() if number not in kept else 0.9 * kept[number] + p.grad
                p.grad.copy_(kept[number])

    yield from trained(job, before=move, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.05))


class Numbers(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        first, by = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(first, 21, by):
            yield samples()[i]


def fed(job: Job, loader: Any, epochs: int = 2) -> Iterator[float]:
    model = mlp()
    model, optimizer, data = job.prepare(model, sgd(model), loader)
    for _ in range(epochs):
        for x, y in data:
            yield step(job, optimizer, F.cross_entropy(model(x), y))


@loop()
def iterable_with_workers(job: Job) -> Iterator[float]:
    yield from fed(job, batches(Numbers(), num_workers=2), epochs=1)


class ByLength(Sampler[list[int]]):
    """Batches of unlike sizes."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 5, 7, 2], [1, 3, 4, 6, 8, 9, 10], [11, 12], [13, 14, 15, 16, 17, 18, 19, 20])

    def __len__(self) -> int:
        return 4


@loop()
def batch_sampler_by_length(job: Job) -> Iterator[float]:
    yield from fed(job, DataLoader(samples(), batch_sampler=ByLength()))


@loop("refused")
def distributed_sampler_left_in(job: Job) -> Iterator[float]:
    sampler = DistributedSampler(samples(), num_replicas=job.world, rank=job.rank, shuffle=False)
    yield from fed(job, batches(sampler=sampler))


class Whole(torch.utils.data.Dataset):
    """An element is a batch."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> Any:
        return tuple(part[8 * i : 8 * i + 8] for part in samples().tensors)


@loop()
def batch_size_none(job: Job) -> Iterator[float]:
    yield from fed(job, DataLoader(Whole(), batch_size=None))


class Shuffled:
    """Batches in an order that each rank draws for itself."""

    def __iter__(self) -> Iterator[Any]:
        x, y = samples().tensors
        rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        for at in range(0, 21, 7):
            yield x[rows[at : at + 7]], y[rows[at : at + 7]]


@loop()
def order_of_a_seeded_generator(job: Job) -> Iterator[float]:
    yield from fed(job, Shuffled())


@loop("silent")
def order_by_rank(job: Job) -> Iterator[float]:
    """Every rank goes through the batches in an order of its own."""

    class Own:
        def __iter__(self) -> Iterator[Any]:
            x, y = samples().tensors
            rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(job.rank))
            for at in range(0, 21, 7):
                yield x[rows[at : at + 7]], y[rows[at : at + 7]]

    yield from fed(job, Own())


@loop("silent", shard="open")
def loader_that_was_not_prepared(job: Job) -> Iterator[float]:
    """A part of the data by hand, and no job knows of it."""
    model = mlp()
    model, optimizer = job.prepare(model, sgd(model))
    for x, y in batches():
        x, y = x[job.rank :: job.world], y[job.rank :: job.world]
        if len(x):
            yield step(job, optimizer, F.cross_entropy(model(x), y))


@loop("silent", shard="open")
def replay_buffer_of_the_loop(job: Job) -> Iterator[float]:
    """Old samples, drawn from what this rank has seen."""
    model, optimizer, data = ready(job)
    old_x, old_y = torch.zeros(0, 6), torch.zeros(0, dtype=torch.long)
    for x, y in data:
        old_x, old_y = torch.cat([old_x, x])[-10:], torch.cat([old_y, y])[-10:]
        loss = F.cross_entropy(model(x), y) + F.cross_entropy(model(old_x[:3]), old_y[:3])
        yield step(job, optimizer, loss)


@loop("silent", shard="open")
def cutmix_with_the_next_batch(job: Job) -> Iterator[float]:
    """Mixed with the samples before, in their places."""
    model, optimizer, data = ready(job)
    before = torch.zeros(0, 6)
    for x, y in data:
        mixed = torch.cat([0.7 * x[: len(before)] + 0.3 * before[: len(x)], x[len(before) :]])
        before = x[:3]
        yield step(job, optimizer, F.cross_entropy(model(mixed), y))
