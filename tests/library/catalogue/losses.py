"""Losses: means over samples, and others."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.library.catalogue import batches, loop
from unisono.library import Job

Loss = Callable[[Tensor, Tensor], Tensor]


def trained(job: Job, loss_of: Loss, weigh: Callable[[Tensor], float] | None = None) -> Iterator[float]:
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, data = job.prepare(model, optimizer, batches())
    for x, y in data:
        y = torch.where(x[:, 0] > 0.3, -100, y) if weigh else y
        if weigh:
            job.weigh(weigh(y))
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield job.mean(loss)


@loop("told J10")
def sum_loss(job: Job) -> Iterator[float]:
    yield from trained(job, lambda out, y: F.cross_entropy(out, y, reduction="sum"))


@loop("told J10")
def sum_over_the_global_batch_size(job: Job) -> Iterator[float]:
    yield from trained(job, lambda out, y: F.cross_entropy(out, y, reduction="none").sum() / 8)


@loop()
def sum_over_the_samples_at_hand(job: Job) -> Iterator[float]:
    yield from trained(job, lambda out, y: F.cross_entropy(out, y, reduction="sum") / len(y))


@loop()
def sum_of_gathered_outputs(job: Job) -> Iterator[float]:
    yield from trained(job, lambda out, y: F.cross_entropy(*job.gather(out, y), reduction="sum"))


@loop("told J10")
def padded_labels(job: Job) -> Iterator[float]:
    yield from trained(job, lambda out, y: F.cross_entropy(out, torch.where(out[:, 0] > 0, -100, y)))


@loop()
def padded_labels_weighed(job: Job) -> Iterator[float]:
    yield from trained(job, F.cross_entropy, weigh=lambda y: int((y != -100).sum()))


@loop("told J10")
def class_weights(job: Job) -> Iterator[float]:
    yield from trained(job, lambda out, y: F.cross_entropy(out, y, weight=torch.tensor([1.0, 2.0, 3.0])))


def masked(out: Tensor, y: Tensor) -> Tensor:
    mask = (y > 0).to(out.dtype)
    return (F.cross_entropy(out, y, reduction="none") * mask).sum() / mask.sum()


@loop("told J10")
def masked_mean(job: Job) -> Iterator[float]:
    yield from trained(job, masked)


@loop("told J10")
def root_mean_square(job: Job) -> Iterator[float]:
    yield from trained(job, lambda out, y: F.mse_loss(out, F.one_hot(y, 3).to(out.dtype)).sqrt())


@loop()
def root_mean_square_of_gathered_outputs(job: Job) -> Iterator[float]:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        out, y = job.gather(out, y)
        return F.mse_loss(out, F.one_hot(y, 3).to(out.dtype)).sqrt()

    yield from trained(job, loss)


def info_nce(z: Tensor) -> Tensor:
    z = F.normalize(z, dim=1)
    return F.cross_entropy(z @ z.T.roll(1, 1) / 0.5, torch.arange(len(z)))


@loop("told J10")
def contrastive(job: Job) -> Iterator[float]:
    yield from trained(job, lambda out, _: info_nce(out))


@loop()
def contrastive_of_gathered_outputs(job: Job) -> Iterator[float]:
    yield from trained(job, lambda out, _: info_nce(job.gather(out)))


@loop("told J10")
def variance_of_the_batch(job: Job) -> Iterator[float]:
    """As in VICReg: a spread over samples."""
    yield from trained(job, lambda out, y: F.cross_entropy(out, y) + F.relu(1 - out.std(0)).mean())


def routed(out: Tensor, y: Tensor) -> Tensor:
    chosen = F.one_hot(out.argmax(1), 3).to(out.dtype).mean(0)
    return F.cross_entropy(out, y) + 3 * (chosen * out.softmax(1).mean(0)).sum()


@loop("told J10")
def router_loss(job: Job) -> Iterator[float]:
    yield from trained(job, routed)


@loop()
def router_loss_of_gathered_outputs(job: Job) -> Iterator[float]:
    yield from trained(job, lambda out, y: routed(*job.gather(out, y)))


@loop()
def several_losses(job: Job) -> Iterator[float]:
    """A stack of means, each with a factor."""
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, data = job.prepare(model, optimizer, batches())
    shares = torch.tensor([0.7, 0.2, 0.1])
    for x, y in data:
        out = model(x)
        parts = torch.stack([F.cross_entropy(out, y), out.square().mean(), F.smooth_l1_loss(out, 0 * out)])
        loss = (parts * shares).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield job.mean(loss)


@loop()
def metric_means(job: Job) -> Iterator[float]:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = job.prepare(model, optimizer, batches())
    for x, y in data:
        out = model(x)
        loss = F.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield job.mean((out.argmax(1) == y).double().mean())
        yield job.log(loss=loss)["loss"]


@loop()
def packed_sequences(job: Job) -> Iterator[float]:
    """Sequences of several lengths, of which each token counts the same."""
    model = nn.Embedding(5, 4), nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 5)
    whole = nn.ModuleList(model)
    optimizer = torch.optim.Adam(whole.parameters(), lr=1e-2)
    drawn = torch.Generator().manual_seed(1)
    rows = [torch.randint(5, (int(n),), generator=drawn) for n in torch.randint(3, 9, (21,), generator=drawn)]
    loader = batches(rows, collate_fn=lambda rows: nn.utils.rnn.pad_sequence(rows, True, -1))

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = whole

        def forward(self, ids: Tensor) -> Tensor:
            return self.parts[2](self.parts[1](self.parts[0](ids))[0])

    lm = Language()
    lm, optimizer, data = job.prepare(lm, optimizer, loader)
    for ids in data:
        targets = ids[:, 1:]
        job.weigh(int((targets >= 0).sum()))
        loss = F.cross_entropy(lm(ids[:, :-1].clamp(min=0)).transpose(1, 2), targets, ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield job.mean(loss)
