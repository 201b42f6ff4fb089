"""What a user writes to have a stack proven: one step of training, without any stack."""

from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from unisono_contrib.library.stacks._adapter import StackPlace


class TrainingStep:
    """One step of a user's training. A subclass at the top of a file says what one device computes: the mean of `loss`
    over all micro-batches of a step, weighed by `weight`, and one step of `optimizer`.

    Each process makes one without arguments, after `torch.manual_seed(0)`. `wrap` and `train` are the user's own use of
    a stack; without them the stack is used as its documentation says.

    clip: the largest norm of a step's gradients, as in `torch.nn.utils.clip_grad_norm_`; 0 for no clipping.
    """

    clip: ClassVar[float] = 0.0

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

    def wrap(self, model: Any, place: "StackPlace") -> Any:
        """Return the model as the stack wants it; None to leave it to the adapter."""
        return None

    def train(self, place: "StackPlace") -> Any:
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
