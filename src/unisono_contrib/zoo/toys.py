"""What the bugs of the zoo share: a small model, its batch in micro-batches, and the layers and sums of stacks.

Shapes: R ranks, M micro-batches of a rank, S samples, 6 numbers a sample, 4 classes. All draws come from set seeds, so
that each process has the same model and batch.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from unisono import gradients_of

RANKS, MICROS, SAMPLES = 2, 3, 6
NOTHING = -100  # a target that cross_entropy leaves out

Gradients = dict[str, Tensor]


def network() -> nn.Module:
    """Return a perceptron with the same weights in each process."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))


def batch(uneven: bool = False) -> tuple[Tensor, Tensor]:
    """Return samples [R, M, S, 6] and targets [R, M, S]. uneven: micro-batch i of R*M leaves out i of S targets."""
    draws = torch.Generator().manual_seed(2)
    x = torch.randn(RANKS, MICROS, SAMPLES, 6, generator=draws)
    y = torch.randint(0, 4, (RANKS, MICROS, SAMPLES), generator=draws)
    if uneven:
        for i, targets in enumerate(y.flatten(0, 1)):
            targets[:i] = NOTHING
    return x, y


def shares(
    make: Callable[[], nn.Module] = network,
    uneven: bool = False,
    extra: Callable[[nn.Module], Any] | None = None,
) -> list[Gradients]:
    """Return the gradient of the mean over all targets on one device, a share for each rank and micro-batch.

    extra: a second loss, of the model's weights alone: the last share."""
    x, y = batch(uneven)
    parts: list[Gradients] = []
    for samples, targets in zip(x.flatten(0, 1), y.flatten(0, 1), strict=True):
        model = make()
        loss = cross_entropy(model(samples), targets, reduction="sum") / (y != NOTHING).sum()
        parts.append(gradients_by(model, loss))
    return parts if extra is None else [*parts, gradients_by(model := make(), extra(model))]


def gradients_by(model: nn.Module, loss: Tensor) -> Gradients:
    """Return the gradients of this loss alone."""
    model.zero_grad()
    loss.backward(retain_graph=True)
    return {name: x.clone() for name, x in gradients_of(model).items()}


def micro_batches(rank: Any, uneven: bool = False) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (number, samples, targets) of each micro-batch of a rank."""
    x, y = batch(uneven)
    yield from ((m, x[rank.rank, m], y[rank.rank, m]) for m in range(MICROS))


def mean_over_ranks(gradients: Mapping[str, Tensor]) -> Gradients:
    """Return the mean of each gradient over all ranks."""
    return {name: summed(x) / dist.get_world_size() for name, x in gradients.items()}


def summed(x: Tensor) -> Tensor:
    """Return the sum over all ranks, as a tensor of its own."""
    x = x.detach().clone()
    dist.all_reduce(x)
    return x


# Experts: sample i goes to expert i % 2 ------------------------------------------------------------------------------


class TwoExperts(nn.Module):
    """A gate, an expert for even samples and one for odd ones, and a head. spread: expert r lies on rank r alone."""

    def __init__(self, spread: Any = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.spread = spread
        self.gate = nn.Linear(6, 8)
        experts = torch.randn(2, 8, 8) / 3
        self.experts = nn.Parameter(experts if spread is None else experts[spread.rank : spread.rank + 1])
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """x [S, 6], with as many even samples as odd ones."""
        h = self.gate(x).tanh()
        halves = torch.cat((h[0::2], h[1::2]))
        if self.spread is None:
            y = torch.cat([half @ w for half, w in zip(halves.chunk(2), self.experts, strict=True)])
        else:
            y = HalvesExchanged.apply(HalvesExchanged.apply(halves) @ self.experts[0])
        return self.head(torch.stack(y.tanh().chunk(2), 1).flatten(0, 1))


class HalvesExchanged(torch.autograd.Function):
    """Half r of each rank's rows goes to rank r; or comes back from it, which is the same exchange."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x.contiguous())
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return HalvesExchanged.forward(ctx, grad)
