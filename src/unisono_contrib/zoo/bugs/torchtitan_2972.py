"""A pipeline's backward starts from the sum over tokens, and only the printed loss is divided by their number."""

from typing import Any

from torch.distributed.pipelining import Schedule1F1B
from torch.nn.functional import cross_entropy

from unisono import gradients_of
from unisono_contrib.zoo.stages import all_gradients, my_stage
from unisono_contrib.zoo.toys import MICROS, Gradients, batch, network

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
    x, y = (z[0].flatten(0, 1) for z in batch())
    model, stage = my_stage(rank)
    tokens = len(y) if normalised else 1
    schedule = Schedule1F1B(
        stage, MICROS, lambda out, t: cross_entropy(out, t, reduction="sum") / tokens, scale_grads=False
    )
    schedule.step(x) if rank.rank == 0 else schedule.step(target=y)
    return all_gradients(model)


def wrong(rank: Any) -> Gradients:
    return right(rank, normalised=False)
