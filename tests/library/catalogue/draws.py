"""Random numbers: whose generator, and where it is drawn from."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.library.catalogue import batches, loop, samples
from tests.library.catalogue.plain import grads, mlp, ready, step, trained
from unisono.library import Job


@loop("silent")
def torch_generator_in_loop(job: Job) -> Iterator[float]:
    own = torch.Generator().manual_seed(1)
    yield from trained(job, seen=lambda x: x + 0.3 * torch.randn(x.shape, generator=own))


@loop("silent")
def torch_generator_in_place(job: Job) -> Iterator[float]:
    own = torch.Generator().manual_seed(1)
    yield from trained(job, seen=lambda x: x + torch.empty_like(x).normal_(0, 0.3, generator=own))


@loop("silent")
def torch_generator_for_a_mask(job: Job) -> Iterator[float]:
    own = torch.Generator().manual_seed(1)
    yield from trained(job, seen=lambda x: x * torch.bernoulli(0 * x + 0.7, generator=own))


@loop("silent")
def torch_generator_for_an_order(job: Job) -> Iterator[float]:
    """Mixup: with whom a sample is mixed."""
    own = torch.Generator().manual_seed(1)
    yield from trained(job, seen=lambda x: 0.7 * x + 0.3 * x[torch.randperm(len(x), generator=own)])


@loop("silent")
def torch_generator_in_the_model(job: Job) -> Iterator[float]:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = torch.Generator().manual_seed(1)

        def forward(self, x: Tensor) -> Tensor:
            return x + 0.3 * torch.randn(x.shape, generator=self.own)

    yield from trained(job, mlp(Noisy()))


@loop("silent")
def torch_generator_for_the_labels(job: Job) -> Iterator[float]:
    """A share of the labels is drawn anew."""
    own = torch.Generator().manual_seed(1)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        other = torch.randint(3, y.shape, generator=own)
        return F.cross_entropy(out, torch.where(torch.rand(len(y), generator=own) < 0.3, other, y))

    yield from trained(job, loss=loss)


@loop()
def torch_generator_for_one_number(job: Job) -> Iterator[float]:
    """All samples share what is drawn: right on any number of ranks, since ranks draw alike."""
    own = torch.Generator().manual_seed(1)
    yield from trained(job, seen=lambda x: x * (1 + 0.3 * torch.randn((), generator=own)))


@loop()
def torch_generator_for_the_order(job: Job) -> Iterator[float]:
    """The loader's own."""
    model, optimizer, data = job.prepare(
        model := mlp(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        batches(shuffle=True, generator=torch.Generator().manual_seed(5)),
    )
    for _ in range(2):
        for x, y in data:
            yield step(job, optimizer, F.cross_entropy(model(x), y))


@loop()
def torch_generator_on_gradients(job: Job) -> Iterator[float]:
    own = torch.Generator().manual_seed(1)

    def noisy(model: nn.Module) -> None:
        for g in grads(model):
            g.mul_(1 + 0.1 * torch.randn((), generator=own))

    yield from trained(job, before=noisy)


@loop("silent")
def numpy_generator_in_loop(job: Job) -> Iterator[float]:
    own = np.random.default_rng(1)
    yield from trained(job, seen=lambda x: x + 0.3 * torch.from_numpy(own.normal(size=tuple(x.shape))))


@loop("silent")
def numpy_generator_for_a_crop(job: Job) -> Iterator[float]:
    """Another shift for each sample."""
    own = np.random.default_rng(1)

    def shifted(x: Tensor) -> Tensor:
        return torch.stack([row.roll(int(own.integers(6)), 0) for row in x])

    yield from trained(job, seen=shifted)


@loop("silent")
def numpy_state_object_in_loop(job: Job) -> Iterator[float]:
    own = np.random.RandomState(1)
    yield from trained(job, seen=lambda x: x + 0.3 * torch.from_numpy(own.randn(*x.shape)))


@loop("silent")
def python_generator_object_in_loop(job: Job) -> Iterator[float]:
    own = random.Random(1)
    yield from trained(job, seen=lambda x: x * torch.tensor([[1.0 + own.random()] for _ in x]))


@loop("silent")
def python_generator_object_shuffles(job: Job) -> Iterator[float]:
    own = random.Random(1)

    def mixed(x: Tensor) -> Tensor:
        rows = list(range(len(x)))
        own.shuffle(rows)
        return 0.7 * x + 0.3 * x[rows]

    yield from trained(job, seen=mixed)


@loop("told")
def manual_seed_each_step(job: Job) -> Iterator[float]:
    number = 0

    def noisy(x: Tensor) -> Tensor:
        nonlocal number
        number += 1
        torch.manual_seed(number)
        return x + 0.3 * torch.randn_like(x)

    yield from trained(job, seen=noisy)


@loop("told")
def normal_inplace_noise(job: Job) -> Iterator[float]:
    yield from trained(job, seen=lambda x: x + torch.empty_like(x).normal_(0, 0.3))


@loop("told")
def distribution_sample(job: Job) -> Iterator[float]:
    yield from trained(job, seen=lambda x: x + torch.distributions.Normal(0.0, 0.3).sample(x.shape))


@loop("told")
def reparameterised_by_a_distribution(job: Job) -> Iterator[float]:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.distributions.Normal(out, 0.1).rsample(), y)

    yield from trained(job, loss=loss)


@loop("told")
def gumbel_softmax(job: Job) -> Iterator[float]:
    yield from trained(job, loss=lambda out, y: F.nll_loss(F.gumbel_softmax(out, dim=1), y))


@loop("silent")
def forked_random_state(job: Job) -> Iterator[float]:
    """`fork_rng` puts the state back: the same numbers in each step, and on each rank."""

    def noisy(x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return x + 0.3 * torch.randn_like(x)

    yield from trained(job, seen=noisy)


@loop("told")
def numpy_random_for_each_sample(job: Job) -> Iterator[float]:
    yield from trained(job, seen=lambda x: x + 0.3 * torch.from_numpy(np.random.randn(*x.shape)))


@loop()
def seed_plus_rank(job: Job) -> Iterator[float]:
    torch.manual_seed(5 + job.rank)
    yield from trained(job)


class Augmented(Dataset):
    def __len__(self) -> int:
        return 21

    def __getitem__(self, i: int) -> Any:
        x, y = samples()[i]
        return x + 0.1 * torch.from_numpy(np.random.randn(6)), y


@loop()
def numpy_random_in_dataset(job: Job) -> Iterator[float]:
    model, optimizer, data = job.prepare(
        model := mlp(), torch.optim.SGD(model.parameters(), lr=0.1), batches(Augmented(), shuffle=True)
    )
    for _ in range(2):
        for x, y in data:
            yield step(job, optimizer, F.cross_entropy(model(x), y))


class OwnGenerator(Dataset):
    """Its noise depends on how often it was asked, by whoever asks."""

    def __init__(self) -> None:
        self.own = torch.Generator().manual_seed(1)

    def __len__(self) -> int:
        return 21

    def __getitem__(self, i: int) -> Any:
        x, y = samples()[i]
        return x + 0.3 * torch.randn(6, generator=self.own), y


@loop("silent")
def generator_of_the_data_set(job: Job) -> Iterator[float]:
    model, optimizer, data = job.prepare(
        model := mlp(), torch.optim.SGD(model.parameters(), lr=0.1), batches(OwnGenerator())
    )
    for _ in range(2):
        for x, y in data:
            yield step(job, optimizer, F.cross_entropy(model(x), y))


class SeededBySample(OwnGenerator):
    def __getitem__(self, i: int) -> Any:
        x, y = samples()[i]
        return x + 0.3 * torch.randn(6, generator=torch.Generator().manual_seed(i)), y


@loop()
def generator_seeded_by_sample(job: Job) -> Iterator[float]:
    model, optimizer, data = job.prepare(
        model := mlp(), torch.optim.SGD(model.parameters(), lr=0.1), batches(SeededBySample())
    )
    for x, y in data:
        yield step(job, optimizer, F.cross_entropy(model(x), y))


@loop("silent")
def noise_made_before_the_loop(job: Job) -> Iterator[float]:
    """A table of noise, whose first rows each rank takes for its own samples."""
    table = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    yield from trained(job, seen=lambda x: x + 0.3 * table[: len(x)])


@loop("silent")
def place_in_the_batch_as_a_feature(job: Job) -> Iterator[float]:
    yield from trained(job, seen=lambda x: x + torch.arange(len(x))[:, None] / 8)


@loop("silent")
def time_steps_by_place_in_the_batch(job: Job) -> Iterator[float]:
    """Antithetic times, as in DDPM's: the second half of the batch has those that the first lacks."""

    def loss(out: Tensor, y: Tensor) -> Tensor:
        t = torch.linspace(0.1, 1, len(y))
        return (F.cross_entropy(out, y, reduction="none") * t).mean()

    yield from trained(job, loss=loss)


@loop("silent")
def hash_of_the_batch_as_seed(job: Job) -> Iterator[float]:
    """Drawn by what the rank sees."""

    def noisy(x: Tensor) -> Tensor:
        own = torch.Generator().manual_seed(int(x.sum().abs() * 1000))
        return x + 0.3 * torch.randn(x.shape, generator=own)

    yield from trained(job, seen=noisy)


@loop("told")
def dropout_by_function(job: Job) -> Iterator[float]:
    yield from trained(job, seen=lambda x: F.dropout(x, 0.3))


@loop("silent")
def masked_in_a_hook(job: Job) -> Iterator[float]:
    """Noise on what a layer makes, by a forward hook."""
    model, optimizer, data = ready(job)
    own = torch.Generator().manual_seed(1)
    model[1].register_forward_hook(
        lambda module, args, out: out * torch.bernoulli(0 * out + 0.8, generator=own)
    )
    for x, y in data:
        yield step(job, optimizer, F.cross_entropy(model(x), y))
