"""Losses are divided by the tokens of the global batch, and the schedule divides by micro-batches as well."""

from typing import Any

from torch.distributed.pipelining import ScheduleGPipe
from torch.nn.functional import cross_entropy

from unisono import gradients_of
from unisono_contrib.zoo.stages import all_gradients, my_stage
from unisono_contrib.zoo.toys import MICROS, Gradients, batch, network

ADDRESS = "areal-project/AReaL#1273"
STACK = "torch pipelining, policy loss"
CAUSE = "factor_of_axis"


def reference() -> list[Gradients]:
    x, y = (z[0] for z in batch())
    parts: list[Gradients] = []
    for samples, targets in zip(x, y, strict=True):
        model = network()
        (cross_entropy(model(samples), targets, reduction="sum") / y.numel()).backward()
        parts.append(gradients_of(model))
    return parts


def right(rank: Any, scale_grads: bool = False) -> Gradients:
    x, y = (z[0].flatten(0, 1) for z in batch())
    model, stage = my_stage(rank)
    tokens = y.numel()
    schedule = ScheduleGPipe(
        stage, MICROS, lambda out, t: cross_entropy(out, t, reduction="sum") / tokens, scale_grads=scale_grads
    )
    schedule.step(x) if rank.rank == 0 else schedule.step(target=y)
    return all_gradients(model)


def wrong(rank: Any) -> Gradients:
    return right(rank, scale_grads=True)
