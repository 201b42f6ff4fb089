"""What a user writes to have a stack proven: one step of training, without any stack."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(slots=True)
class StackPlace:
    """Where a rank is in a user's training under a stack.

    rank, world: of all ranks. groups: ranks with data of their own. micros: micro-batches of a rank in a step.
    options: the stack's, as they were passed to `check_stack`. model: as the stack has wrapped it. stack: the stack's
    object, where it has one. step: which, counted from 0. batches, weights: this rank's micro-batches of the step, and
    how much each counts. total_weight: of the global batch. clip: the largest norm, 0 for none.
    """

    rank: int
    world: int
    groups: int
    micros: int
    options: dict[str, Any]
    clip: float = 0.0
    model: Any = None
    optimizer: Any = None
    stack: Any = None
    step: int = 0
    batches: Sequence[Any] = ()
    weights: Sequence[float] = ()
    total_weight: float = 1.0

    def part(self, micro: int) -> float:
        """Return the factor of a micro-batch's loss where the stack takes the mean over ranks, and no mean over
        micro-batches."""
        return self.weights[micro] * self.groups / self.total_weight


class TrainingStep:
    """One step of a user's training. A subclass at the top of a file says what one device computes: the mean of `loss`
    over all micro-batches of a step, weighed by `weight`, and one step of `optimizer`.

    Each process makes one, after `torch.manual_seed(0)`, without arguments or with the keywords of a partial. `wrap`
    and `train` are the user's own use of a stack; without them the stack is used as its documentation says.

    clip: the largest norm of a step's gradients, as in `torch.nn.utils.clip_grad_norm_`; 0 for no clipping.
    """

    clip: float = 0.0

    @abstractmethod
    def model(self) -> nn.Module:
        """Return the model, with its initial weights. For JAX: a tree of arrays."""
        raise NotImplementedError

    @abstractmethod
    def batch(self, number: int) -> Any:
        """Return the micro-batch of this number, counted over steps, ranks and micro-batches of a rank, in this order
        from the slowest to the quickest. It must be the same in each process."""
        raise NotImplementedError

    @abstractmethod
    def loss(self, model: Any, batch: Any) -> Any:
        """Return the mean loss of one micro-batch, a scalar."""
        raise NotImplementedError

    def weight(self, batch: Any) -> float:
        """Return how much a micro-batch counts in the mean over the global batch, such as its number of targets."""
        return 1.0

    def optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        """Return the optimiser."""
        return torch.optim.SGD(params, lr=0.1)

    def wrap(self, model: Any, place: StackPlace) -> Any:
        """Return the model as the stack wants it; None to leave it to the adapter."""
        return None

    def train(self, place: StackPlace) -> Any:
        """Make one step on the stack. NotImplemented leaves it to the adapter."""
        return NotImplemented


def numbers_of(step: int, ranks: int, micros: int) -> range:
    """The numbers of the micro-batches of one step, counted from 0."""
    return range(step * ranks * micros, (step + 1) * ranks * micros)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model that are trained, in its order."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def total(weights: Iterable[Tensor | float]) -> float:
    """The sum of weights, whatever they are kept in."""
    return float(sum(float(w) for w in weights))
