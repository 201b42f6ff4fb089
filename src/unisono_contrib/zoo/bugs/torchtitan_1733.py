"""The schedule scales all gradients at the end of each call, those of earlier calls of the same step again with it."""

from typing import Any

from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import cross_entropy

from unisono import gradients_of
from unisono_contrib.zoo.toys import Gradients, batch, network, of_all_stages, shares

ADDRESS = "pytorch/torchtitan#1733"
STACK = "torch pipelining, accumulation"
CAUSE = "rescaled_each_micro_batch"
CALLS = 6  # accumulation steps, of two micro-batches of the pipeline each


def reference() -> list[Gradients]:
    return shares()


def right(rank: Any, scale_grads: bool = False) -> Gradients:
    layers = list(network().children())
    model = nn.Sequential(*(layers[:2] if rank.rank == 0 else layers[2:]))
    names = dict(zip(model.state_dict(), list(network().state_dict())[2 * rank.rank :], strict=False))
    stage = PipelineStage(model, rank.rank, 2, next(model.parameters()).device)
    share = CALLS if scale_grads else CALLS * 2
    schedule = ScheduleGPipe(stage, 2, lambda out, y: cross_entropy(out, y) / share, scale_grads=scale_grads)
    for x, y in zip(*(z.flatten(0, 1) for z in batch()), strict=True):
        schedule.step(x) if rank.rank == 0 else schedule.step(target=y)
    return of_all_stages({names[name]: g for name, g in gradients_of(model).items()})


def wrong(rank: Any) -> Gradients:
    return right(rank, scale_grads=True)
