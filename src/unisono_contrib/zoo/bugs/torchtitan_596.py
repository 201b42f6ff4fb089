"""Each stage of a pipeline clips its gradients by their own norm, and no stage knows the norm of the whole model."""

from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from unisono import gradients_of
from unisono_contrib.zoo.toys import MICROS, Gradients, batch, network, of_all_stages, summed

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
    layers, (x, y) = list(network().children()), batch()
    model = nn.Sequential(*(layers[:2] if rank.rank == 0 else layers[2:]))
    schedule = ScheduleGPipe(PipelineStage(model, rank.rank, 2, torch.device("cpu")), MICROS, cross_entropy)
    schedule.step(x[0].flatten(0, 1)) if rank.rank == 0 else schedule.step(target=y[0].flatten())
    norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    clip_grads_with_norm_(model.parameters(), LARGEST, summed(norm.square()).sqrt() if of_all else norm)
    names = dict(zip(model.state_dict(), list(network().state_dict())[2 * rank.rank :], strict=False))
    return of_all_stages({names[name]: g for name, g in gradients_of(model).items()})


def wrong(rank: Any) -> Gradients:
    return right(rank, of_all=False)
