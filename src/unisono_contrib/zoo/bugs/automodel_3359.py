"""The loss of the experts' balance is not divided by the number of micro-batches, as that of the tokens is."""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from unisono import gradients_of
from unisono_contrib.zoo.toys import MICROS, Gradients, TwoExperts, micro_batches, shares

ADDRESS = "NVIDIA-NeMo/Automodel#3359"
STACK = "DDP, experts, accumulation"
CAUSE = "counted_twice"


def _balance(model: nn.Module) -> Tensor:
    """A loss of the gate's weights, in place of that of the loads."""
    return model.get_parameter("gate.weight").square().mean()


def reference() -> list[Gradients]:
    return shares(TwoExperts, extra=_balance)


def right(rank: Any, balance_divided_by: int = MICROS) -> Gradients:
    model = DistributedDataParallel(TwoExperts())
    for m, x, y in micro_batches(rank):
        model.require_backward_grad_sync = m == MICROS - 1
        (cross_entropy(model(x), y) / MICROS + _balance(model.module) / balance_divided_by).backward()
    return gradients_of(model)


def wrong(rank: Any) -> Gradients:
    return right(rank, balance_divided_by=1)
