"""Steps of training as users of other stacks write them, right and wrong. Imported by the ranks of tests."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import unisono


class Digits(unisono.TrainingStep):
    """A small classifier by SGD, on random rows."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 4))

    def batch(self, number: int) -> Any:
        drawn = torch.Generator().manual_seed(number)
        return torch.randn(5, 6, generator=drawn), torch.randint(0, 4, (5,), generator=drawn)

    def loss(self, model: Any, batch: Any) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1])


class Decaying(Digits):
    clip = 0.05

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


class Momentum(Digits):
    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


class Muon(Digits):
    """Matrices by Muon; vectors stay as they are."""

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Muon([p for p in params if p.dim() == 2], lr=1e-2, weight_decay=0.0)


class Uneven(Decaying):
    """Micro-batches with other numbers of targets."""

    def batch(self, number: int) -> Any:
        x, y = super().batch(number)
        return x, torch.where(torch.arange(5) < number % 3, -100, y)

    def weight(self, batch: Any) -> float:
        return float((batch[1] != -100).sum())


# Wrong uses of a stack -----------------------------------------------------------------------------------------------


class StepsEachMicroBatch(Decaying):
    def train(self, place: Any) -> None:
        for batch in place.batches:
            self.loss(place.model, batch).backward()
            place.optimizer.step()
            place.optimizer.zero_grad()


class NeverClips(Decaying):
    def train(self, place: Any) -> Any:
        place.clip = 0.0
        return NotImplemented


class NeverSynced(Digits):
    def train(self, place: Any) -> None:
        for batch in place.batches:
            with place.model.no_sync():
                (self.loss(place.model, batch) / len(place.batches)).backward()
        place.optimizer.step()
        place.optimizer.zero_grad()


class MeansOfMeans(Uneven):
    def train(self, place: Any) -> Any:
        place.weights, place.total_weight = [1.0] * place.micros, float(place.micros * place.groups)
        return NotImplemented


class NeverZeroed(Digits):
    def train(self, place: Any) -> None:
        for batch in place.batches:
            (self.loss(place.model, batch) / len(place.batches)).backward()
        place.optimizer.step()


# Loops that return weights -------------------------------------------------------------------------------------------

RANKS, MICROS = 2, 2


def loop(
    rank: Any, step: unisono.TrainingStep, optimizer: Any = None, steps: int = 2, **how: Any
) -> list[Any]:
    """A loop by hand. optimizer(params): in the place of the step's. each: whether it steps after each micro-batch."""
    torch.manual_seed(0)
    model = step.model()
    inner = (optimizer or step.optimizer)(list(model.parameters()))
    weights = []
    for number in range(steps):
        first = (number * rank.world + rank.rank) * MICROS
        for micro in range(how.get("first", 0), MICROS):
            each = how.get("each", False)
            (step.loss(model, step.batch(first + micro)) / (1 if each else MICROS)).backward()
            if micro == MICROS - 1 or each:
                for p in model.parameters():
                    dist.all_reduce(p.grad)
                    p.grad.div_(rank.world)
                if step.clip and not how.get("loose"):
                    nn.utils.clip_grad_norm_(model.parameters(), step.clip)
                inner.step()
                inner.zero_grad()
        weights.append(copy.deepcopy(dict(model.named_parameters())))
    return weights


def right(rank: Any) -> list[Any]:
    return loop(rank, Decaying())


def without_decay(rank: Any) -> list[Any]:
    return loop(rank, Decaying(), lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.0))


def another_rate(rank: Any) -> list[Any]:
    return loop(rank, Decaying(), lambda params: torch.optim.AdamW(params, lr=2e-2, weight_decay=0.05))


def each_micro_batch(rank: Any) -> list[Any]:
    return loop(rank, Decaying(), each=True)


def loose(rank: Any) -> list[Any]:
    return loop(rank, Momentum(), loose=True)


def plain_momentum(rank: Any) -> list[Any]:
    return loop(rank, Momentum(), lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.01))


def first_lost(rank: Any) -> list[Any]:
    return loop(rank, Decaying(), first=1)


def muon_is_sgd(rank: Any) -> list[Any]:
    return loop(rank, Muon(), lambda params: torch.optim.SGD([p for p in params if p.dim() == 2], lr=1e-2))


def muon_right(rank: Any) -> list[Any]:
    return loop(rank, Muon())


def last_weights(rank: Any) -> Any:
    return loop(rank, Decaying())[-1]


def adam_for_adamw(rank: Any) -> list[Any]:
    return loop(rank, Momentum(), lambda params: torch.optim.Adam(params, lr=1e-3))
