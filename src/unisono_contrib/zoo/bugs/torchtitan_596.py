"""Each stage of a pipeline clips its gradients by their own norm, and no stage knows the norm of the whole model."""

from typing import Any

from torch import nn
from torch.distributed.pipelining import ScheduleGPipe
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from unisono import gradients_of
from unisono_contrib.zoo.stages import all_gradients, my_stage
from unisono_contrib.zoo.toys import MICROS, Gradients, batch, network, summed

ADDRESS = "pytorch/torchtitan#596"
STACK = "torch pipelining"
CAUSE = "partial_norm"
LARGEST = 1e-2


def reference() -> Gradients:
    model, (x, y) = network(), batch()
    cross_entropy(model(x[0].flatten(0, 1)), y[0].flatten()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), LARGEST)
    return gradients_of(model)


def right(rank: Any, of_all: bool = True) -> Gradients:
    x, y = batch()
    model, stage = my_stage(rank)
    schedule = ScheduleGPipe(stage, MICROS, cross_entropy)
    schedule.step(x[0].flatten(0, 1)) if rank.rank == 0 else schedule.step(target=y[0].flatten())
    norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    clip_grads_with_norm_(model.parameters(), LARGEST, summed(norm.square()).sqrt() if of_all else norm)
    return all_gradients(model)


def wrong(rank: Any) -> Gradients:
    return right(rank, of_all=False)
