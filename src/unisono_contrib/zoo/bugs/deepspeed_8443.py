"""ZeRO-3 applies Muon where gradients are reduced, so each micro-batch has an update of its own."""

from typing import Any

from torch.nn import Module

from unisono_contrib.zoo.toys import Gradients, mean_over_ranks
from unisono_contrib.zoo.toys_update import (
    MICROS,
    gradients_by,
    my_gradients,
    my_micro_batches,
    set_gradients,
    weights_of,
)
from unisono_contrib.zoo.toys_update import MuonStep as Step

ADDRESS = "deepspeedai/DeepSpeed#8443"
STACK = "Muon under ZeRO-3 by hand"
CAUSE = "steps_per_micro_batch"


def right(rank: Any, at_reduce: bool = False) -> Gradients:
    model: Module = Step().model()
    if at_reduce:
        losses = [Step().loss(model, each) for each in my_micro_batches(Step(), rank)]
        reduced = [mean_over_ranks(gradients_by(model, loss / MICROS)) for loss in losses]
    else:
        reduced = [mean_over_ranks(my_gradients(Step(), model, rank))]
    optimizer = Step().optimizer(model.parameters())
    for gradients in reduced:
        set_gradients(model, gradients)
        optimizer.step()
    return weights_of(model)


def wrong(rank: Any) -> Gradients:
    return right(rank, at_reduce=True)
