"""What a batch's samples say of each other: statistics with and without gradients, samples that meet in the model."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.library.catalogue import batches, loop
from tests.library.catalogue.plain import each, ready, step, trained
from unisono.library import Job


@loop("silent")
def advantages_normalised(job: Job) -> Iterator[float]:
    """As in every PPO."""

    def loss(out: Tensor, y: Tensor) -> Tensor:
        reward = out.detach()[:, 0] + y
        advantage = (reward - reward.mean()) / (reward.std() + 1e-8)
        return (each(out, y) * advantage).mean()

    yield from trained(job, loss=loss)


@loop()
def advantages_normalised_over_all(job: Job) -> Iterator[float]:
    """The remedy: of what `job.gather` brings."""

    def loss(out: Tensor, y: Tensor) -> Tensor:
        reward = out.detach()[:, 0] + y
        whole = job.gather(reward)
        advantage = (reward - whole.mean()) / (whole.std() + 1e-8)
        return (each(out, y) * advantage).mean()

    yield from trained(job, loss=loss)


@loop("silent")
def baseline_of_the_batch(job: Job) -> Iterator[float]:
    """REINFORCE: less the mean reward."""

    def loss(out: Tensor, y: Tensor) -> Tensor:
        reward = (out.argmax(1) == y).to(out.dtype)
        return (each(out, y) * (reward - reward.mean())).mean()

    yield from trained(job, loss=loss)


@loop("silent")
def ranks_of_samples_as_weights(job: Job) -> Iterator[float]:
    """The worst of the batch counts most."""

    def loss(out: Tensor, y: Tensor) -> Tensor:
        own = each(out, y)
        place = own.detach().argsort().argsort().to(out.dtype)
        return (own * (place + 1) / len(y)).mean()

    yield from trained(job, loss=loss)


@loop("silent")
def losses_over_the_worst(job: Job) -> Iterator[float]:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        own = each(out, y)
        return (own * own.detach() / own.detach().max()).mean()

    yield from trained(job, loss=loss)


@loop("silent")
def softmax_of_losses_as_weights(job: Job) -> Iterator[float]:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        own = each(out, y)
        return (own * own.detach().softmax(0) * len(y)).mean()

    yield from trained(job, loss=loss)


@loop("silent")
def outliers_left_out(job: Job) -> Iterator[float]:
    """Samples whose loss is more than the batch's median do not count."""

    def loss(out: Tensor, y: Tensor) -> Tensor:
        own = each(out, y)
        return (own * (own.detach() <= own.detach().median()).to(out.dtype)).mean()

    yield from trained(job, loss=loss)


@loop("silent")
def inputs_normalised_by_batch(job: Job) -> Iterator[float]:
    yield from trained(job, seen=lambda x: (x - x.mean(0)) / (x.std(0) + 1e-5))


@loop("silent")
def inputs_less_their_mean(job: Job) -> Iterator[float]:
    yield from trained(job, seen=lambda x: x - x.mean(0, keepdim=True), size=4)


@loop("silent")
def inputs_over_the_largest(job: Job) -> Iterator[float]:
    yield from trained(job, seen=lambda x: x / x.abs().max())


@loop("silent")
def inputs_whitened(job: Job) -> Iterator[float]:
    """By the batch's covariance."""

    def white(x: Tensor) -> Tensor:
        x = x - x.mean(0)
        return x @ torch.linalg.inv(x.T @ x / len(x) + torch.eye(6))

    yield from trained(job, seen=white)


@loop()
def inputs_normalised_by_sample(job: Job) -> Iterator[float]:
    yield from trained(job, seen=lambda x: (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True))


@loop("silent")
def class_balance_from_batch(job: Job) -> Iterator[float]:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        share = torch.bincount(y, minlength=3).to(out.dtype) / len(y)
        return (each(out, y) / (share[y] + 0.1)).mean()

    yield from trained(job, loss=loss)


@loop("silent")
def positives_against_negatives(job: Job) -> Iterator[float]:
    """`pos_weight` counted in the batch."""

    def loss(out: Tensor, y: Tensor) -> Tensor:
        yes = (y == 0).to(out.dtype)
        weight = (len(y) - yes.sum()) / (yes.sum() + 1)
        return F.binary_cross_entropy_with_logits(out[:, 0], yes, pos_weight=weight)

    yield from trained(job, loss=loss)


@loop("silent")
def loss_over_its_own_value(job: Job) -> Iterator[float]:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        value = F.cross_entropy(out, y)
        return value / value.detach()

    yield from trained(job, loss=loss)


@loop("silent")
def two_losses_balanced_by_value(job: Job) -> Iterator[float]:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        value, other = F.cross_entropy(out, y), out.square().mean()
        return value + other * (value / other).detach()

    yield from trained(job, loss=loss)


@loop("silent")
def focal_by_mean_probability(job: Job) -> Iterator[float]:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            sure = out.softmax(1).gather(1, y[:, None]).mean()
        return (1 - sure) ** 2 * F.cross_entropy(out, y)

    yield from trained(job, loss=loss)


@loop("silent")
def temperature_by_spread(job: Job) -> Iterator[float]:
    yield from trained(job, loss=lambda out, y: F.cross_entropy(out / out.detach().std(), y))


@loop("silent")
def targets_by_sinkhorn(job: Job) -> Iterator[float]:
    """As SwAV's assignments: rows and columns of the batch, made even by turns."""

    def loss(out: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            goal = out.exp()
            for _ in range(3):
                goal = goal / goal.sum(0, keepdim=True)
                goal = goal / goal.sum(1, keepdim=True)
        return -(goal * out.log_softmax(1)).sum(1).mean() + F.cross_entropy(out, y)

    yield from trained(job, loss=loss)


@loop("silent")
def targets_mixed_by_flip(job: Job) -> Iterator[float]:
    """The picture of one, the label of its opposite."""
    yield from trained(job, loss=lambda out, y: F.cross_entropy(out, y) + F.cross_entropy(out, y.flip(0)))


@loop("silent")
def label_smoothing_by_batch(job: Job) -> Iterator[float]:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        hot = F.one_hot(y, 3).to(out.dtype)
        return F.cross_entropy(out, 0.9 * hot + 0.1 * hot.mean(0))

    yield from trained(job, loss=loss)


@loop("silent")
def length_as_rate(job: Job) -> Iterator[float]:
    """The rate by the batch's size."""
    model, optimizer, data = ready(job)
    for _ in range(2):
        for x, y in data:
            optimizer.param_groups[0]["lr"] = 0.02 * len(x)
            yield step(job, optimizer, F.cross_entropy(model(x), y))


@loop("silent")
def steps_counted_by_samples(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job)
    seen = 0
    for _ in range(2):
        for x, y in data:
            seen += len(x)
            optimizer.param_groups[0]["lr"] = 0.1 * 0.98**seen
            yield step(job, optimizer, F.cross_entropy(model(x), y))


@loop("silent")
def mean_over_a_fixed_batch_size(job: Job) -> Iterator[float]:
    """`* len(x) / 8` where the loader's last batch is short."""
    model, optimizer, data = ready(job)
    for x, y in data:
        yield step(job, optimizer, F.cross_entropy(model(x), y) * (len(x) / 8))


@loop("silent")
def every_nth_sample_by_rank(job: Job) -> Iterator[float]:
    """Samples are dealt once more, by hand."""
    model, optimizer, data = ready(job, size=12)
    for x, y in data:
        x, y = x[job.rank :: job.world], y[job.rank :: job.world]
        yield step(job, optimizer, F.cross_entropy(model(x), y))


@loop("silent")
def padded_to_longest_in_batch(job: Job) -> Iterator[float]:
    """The mean goes over padding, too."""
    drawn = torch.Generator().manual_seed(1)
    rows = [torch.randn(int(n), 4, generator=drawn) for n in torch.randint(2, 9, (21,), generator=drawn)]
    padded = batches(rows, collate_fn=lambda rows: list(rows))
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = job.prepare(model, optimizer, padded)
    for batch in data:
        x = nn.utils.rnn.pad_sequence(batch, batch_first=True)
        yield step(job, optimizer, F.mse_loss(model(x), x.roll(1, 2)))


def words() -> list[Tensor]:
    drawn = torch.Generator().manual_seed(1)
    return [
        torch.randint(1, 5, (int(n),), generator=drawn) for n in torch.randint(2, 9, (21,), generator=drawn)
    ]


@loop("silent")
def padded_by_collate(job: Job) -> Iterator[float]:
    """The batch is padded as a whole, before it is dealt: a rank has the padding of all."""
    model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = batches(words(), collate_fn=lambda rows: nn.utils.rnn.pad_sequence(rows, batch_first=True))
    model, optimizer, data = job.prepare(model, optimizer, loader)
    for x in data:
        yield step(job, optimizer, F.cross_entropy(model(x).flatten(0, 1), x.roll(1, 1).flatten()))


@loop("told")
def token_mean_without_padding(job: Job) -> Iterator[float]:
    """`ignore_index`: a mean over tokens, of which ranks have other numbers."""
    model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = batches(words(), collate_fn=lambda rows: nn.utils.rnn.pad_sequence(rows, batch_first=True))
    model, optimizer, data = job.prepare(model, optimizer, loader)
    for x in data:
        yield step(job, optimizer, F.cross_entropy(model(x).transpose(1, 2), x, ignore_index=0))


@loop("silent")
def token_mean_by_selection(job: Job) -> Iterator[float]:
    """Tokens are picked by a mask, and their number is another on each rank."""
    model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = batches(words(), collate_fn=lambda rows: nn.utils.rnn.pad_sequence(rows, batch_first=True))
    model, optimizer, data = job.prepare(model, optimizer, loader)
    for x in data:
        real = x > 0
        yield step(job, optimizer, F.cross_entropy(model(x)[real], x[real]))
