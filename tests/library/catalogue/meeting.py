"""Samples that meet: in the model, or in the loss."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.library.catalogue import loop
from tests.library.catalogue.plain import each, mlp, ready, step, trained
from unisono.library import Job


class Across(nn.Module):
    """Attention in which samples see each other."""

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x[None], x[None], x[None])[0]


@loop("silent")
def attention_over_batch(job: Job) -> Iterator[float]:
    yield from trained(job, mlp(Across()))


class AcrossByHand(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ x.T / 4).softmax(1) @ x


@loop("silent")
def set_attention_by_hand(job: Job) -> Iterator[float]:
    yield from trained(job, mlp(AcrossByHand()))


@loop("silent")
def attention_module_without_batch_first(job: Job) -> Iterator[float]:
    """[samples, 1, width] given to a layer that takes [length, samples, width]: a common slip."""

    class Slip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = nn.MultiheadAttention(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.attend(x[:, None], x[:, None], x[:, None])[0][:, 0]

    yield from trained(job, mlp(Slip()))


class Opposite(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * x.flip(0)


@loop("silent")
def flip_in_the_model(job: Job) -> Iterator[float]:
    yield from trained(job, mlp(Opposite()))


@loop("silent")
def shift_in_the_model(job: Job) -> Iterator[float]:
    class Shift(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x[:1], x[1:] + x[:-1]])

    yield from trained(job, mlp(Shift()))


@loop("silent")
def fft_over_samples(job: Job) -> Iterator[float]:
    class Mixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.fft2(x).real / len(x)

    yield from trained(job, mlp(Mixed()))


@loop("silent")
def softmax_over_samples(job: Job) -> Iterator[float]:
    class Sharing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.softmax(0)

    yield from trained(job, mlp(Sharing()))


@loop("silent")
def mean_over_samples_in_the_model(job: Job) -> Iterator[float]:
    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    yield from trained(job, mlp(Centred()))


@loop("silent")
def graph_of_the_batch(job: Job) -> Iterator[float]:
    """Neighbours are the nearest of the batch."""

    class Nearest(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            near = torch.cdist(x, x).detach().topk(2, largest=False).indices[:, 1]
            return x + x[near]

    yield from trained(job, mlp(Nearest()))


@loop("silent")
def conv_over_samples(job: Job) -> Iterator[float]:
    """[samples, width] taken as [channels, length] of one, transposed."""

    class Along(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(16, 16, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x.T[None])[0].T

    yield from trained(job, mlp(Along()))


@loop("silent")
def lstm_over_samples(job: Job) -> Iterator[float]:
    class Along(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTM(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.cell(x)[0]  # samples are taken for time

    yield from trained(job, mlp(Along()))


@loop("silent")
def cumsum_over_batch(job: Job) -> Iterator[float]:
    yield from trained(job, loss=lambda out, y: F.cross_entropy(out.cumsum(0) / len(out), y))


@loop("silent")
def cummax_over_batch(job: Job) -> Iterator[float]:
    yield from trained(job, loss=lambda out, y: F.cross_entropy(out.cummax(0).values, y))


@loop("silent")
def negatives_by_flip(job: Job) -> Iterator[float]:
    """The samples are paired before the model sees them."""
    model, optimizer, data = ready(job)
    for x, y in data:
        out, other = model(x), model(x.flip(0))
        apart = F.relu(1 - (out - other).square().sum(1)).mean()
        yield step(job, optimizer, F.cross_entropy(out, y) + apart)


@loop("told")
def negatives_by_roll(job: Job) -> Iterator[float]:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y) + F.relu(1 - (out - out.roll(1, 0)).square().sum(1)).mean()

    yield from trained(job, loss=loss)


@loop("silent")
def negatives_by_permutation(job: Job) -> Iterator[float]:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        other = out[torch.arange(len(out) - 1, -1, -1)]
        return F.cross_entropy(out, y) + F.relu(1 - (out - other).square().sum(1)).mean()

    yield from trained(job, loss=loss)


@loop("told")
def neighbours_must_differ(job: Job) -> Iterator[float]:
    yield from trained(
        job, loss=lambda out, y: F.cross_entropy(out, y) - 0.1 * out.diff(dim=0).square().mean()
    )


@loop("told")
def hard_examples(job: Job) -> Iterator[float]:
    yield from trained(job, loss=lambda out, y: each(out, y).topk(2).values.mean())


@loop("told")
def dice_loss(job: Job) -> Iterator[float]:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        p, hot = out.softmax(1), F.one_hot(y, 3)
        return 1 - 2 * (p * hot).sum() / (p.sum() + hot.sum())

    yield from trained(job, loss=loss)


@loop("told")
def quantile_of_batch(job: Job) -> Iterator[float]:
    yield from trained(job, loss=lambda out, y: each(out, y).quantile(0.7))


@loop("silent")
def moco_queue(job: Job) -> Iterator[float]:
    """Keys of past batches, first in, first out."""
    model, optimizer, data = ready(job)
    queue = F.normalize(torch.eye(3).repeat(4, 1), dim=1)
    for _ in range(2):
        for x, _ in data:
            query = F.normalize(model(x), dim=1)
            key = F.normalize(model(x + 0.1), dim=1).detach()
            logits = torch.cat([(query * key).sum(1, keepdim=True), query @ queue.T], 1)
            yield step(job, optimizer, F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long)))
            queue = torch.cat([queue, key])[-12:]


@loop("silent")
def centre_moved_by_the_loop(job: Job) -> Iterator[float]:
    """As DINO's: a mean of outputs that the loop keeps."""
    centre = torch.zeros(3)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        nonlocal centre
        value = F.cross_entropy(out - centre, y)
        centre = 0.5 * centre + 0.5 * out.detach().mean(0)
        return value

    yield from trained(job, loss=loss)


@loop("silent")
def rate_by_a_mean_of_local_losses(job: Job) -> Iterator[float]:
    """A running mean that decides how much the loss counts."""
    mean = 1.0

    def loss(out: Tensor, y: Tensor) -> Tensor:
        nonlocal mean
        value = F.cross_entropy(out, y)
        mean = 0.5 * mean + 0.5 * value.item()
        return value / mean

    yield from trained(job, loss=loss)


@loop(shard="open")
def l2_of_parameters_in_loss(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job)
    for x, y in data:
        size = sum(p.square().sum() for p in model.parameters())
        yield step(job, optimizer, F.cross_entropy(model(x), y) + 1e-2 * size)


@loop("told")
def instance_norm_running_stats(job: Job) -> Iterator[float]:
    model = nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten(), nn.Linear(6, 3)
    )
    yield from trained(job, model)


def weighed(job: Job, weight: Any) -> Iterator[float]:
    yield from trained(job, loss=lambda out, y: (each(out, y) * weight(out.detach(), y)).mean())


@loop()
def weights_by_sample(job: Job) -> Iterator[float]:
    """Without a gradient as well, but of each sample alone."""
    yield from weighed(job, lambda out, y: 1 - out.softmax(1).gather(1, y[:, None])[:, 0])


@loop("silent")
def weights_that_add_up_to_one(job: Job) -> Iterator[float]:
    def weight(out: Tensor, y: Tensor) -> Tensor:
        own = 1 - out.softmax(1).gather(1, y[:, None])[:, 0]
        return own / own.sum() * len(y)

    yield from weighed(job, weight)
