"""The loss is divided by the tokens of all micro-batches already, and the trainer divides it by their number again."""

from typing import Any

from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from unisono import gradients_of
from unisono_contrib.zoo.toys import MICROS, SAMPLES, Gradients, micro_batches, network, shares

ADDRESS = "modelscope/ms-swift#10117"
STACK = "DDP, policy loss"
CAUSE = "factor_of_axis"


def reference() -> list[Gradients]:
    return shares()


def right(rank: Any, trainer_divides_by: int = 1) -> Gradients:
    model = DistributedDataParallel(network())
    for m, x, y in micro_batches(rank):
        model.require_backward_grad_sync = m == MICROS - 1
        loss = cross_entropy(model(x), y, reduction="sum") / (MICROS * SAMPLES)
        (loss / trainer_divides_by).backward()
    return gradients_of(model)


def wrong(rank: Any) -> Gradients:
    return right(rank, trainer_divides_by=MICROS)
