"""A pipeline's backward starts from the sum over tokens, and only the printed loss is divided by their number."""

from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy

from unisono import gradients_of
from unisono_contrib.zoo.toys import MICROS, Gradients, batch, network, of_all_stages

ADDRESS = "pytorch/torchtitan#2972"
STACK = "torch pipelining"
CAUSE = "factor_of_axis"


def reference() -> list[Gradients]:
    x, y = (z[0].flatten(0, 1) for z in batch())
    parts: list[Gradients] = []
    for sample, target in zip(x.split(1), y.split(1), strict=True):
        model = network()
        (cross_entropy(model(sample), target) / len(x)).backward()
        parts.append(gradients_of(model))
    return parts


def right(rank: Any, normalised: bool = True) -> Gradients:
    layers, (x, y) = list(network().children()), (z[0].flatten(0, 1) for z in batch())
    model = nn.Sequential(*(layers[:2] if rank.rank == 0 else layers[2:]))
    stage, tokens = PipelineStage(model, rank.rank, 2, torch.device("cpu")), len(y) if normalised else 1
    schedule = Schedule1F1B(
        stage, MICROS, lambda out, t: cross_entropy(out, t, reduction="sum") / tokens, scale_grads=False
    )
    schedule.step(x) if rank.rank == 0 else schedule.step(target=y)
    names = dict(zip(model.state_dict(), list(network().state_dict())[2 * rank.rank :], strict=False))
    return of_all_stages({names[name]: g for name, g in gradients_of(model).items()})


def wrong(rank: Any) -> Gradients:
    return right(rank, normalised=False)
