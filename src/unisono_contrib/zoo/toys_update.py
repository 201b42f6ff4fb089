"""Training steps of the zoo's bugs in updates: the toys' model and batch under an optimiser."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from unisono.library.stacks import TrainingStep
from unisono_contrib.zoo.toys import Gradients, batch, gradients_by, network

MICROS = 2


class ToyStep(TrainingStep):
    """The toys' network and batch, by SGD."""

    def model(self) -> nn.Module:
        return network()

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        x, y = (z.flatten(0, 1) for z in batch())
        return x[number % len(x)], y[number % len(y)]

    def loss(self, model: Any, batch: Any) -> Tensor:
        x, y = batch
        return cross_entropy(model(x), y)


class MuonStep(ToyStep):
    """A network without biases, by Muon (Jordan 2024)."""

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 16, bias=False), nn.GELU(), nn.Linear(16, 4, bias=False))

    def optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.Muon(params, lr=0.02, weight_decay=0.0)


def my_micro_batches(step: TrainingStep, rank: Any) -> list[Any]:
    """Return the micro-batches of this rank in the first step."""
    return [step.batch(rank.rank * MICROS + m) for m in range(MICROS)]


def my_gradients(step: TrainingStep, model: nn.Module, rank: Any) -> Gradients:
    """Return the gradient of the mean over this rank's micro-batches."""
    losses = [step.loss(model, each) for each in my_micro_batches(step, rank)]
    return gradients_by(model, torch.stack(losses).mean())


def set_gradients(model: nn.Module, gradients: Gradients) -> None:
    """Put gradients where an optimiser looks for them."""
    for name, p in model.named_parameters():
        p.grad = gradients[name]


def weights_of(model: nn.Module) -> Gradients:
    """Return the weights, without their graph."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}
