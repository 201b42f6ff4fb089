"""The schedule scales all gradients at the end of each call, those of earlier calls of the same step again with it."""

from typing import Any

from torch.distributed.pipelining import ScheduleGPipe
from torch.nn.functional import cross_entropy

from unisono_contrib.zoo.stages import all_gradients, my_stage
from unisono_contrib.zoo.toys import Gradients, batch, shares

ADDRESS = "pytorch/torchtitan#1733"
STACK = "torch pipelining, accumulation"
CAUSE = "rescaled_each_micro_batch"
CALLS = 6  # accumulation steps, of two micro-batches of the pipeline each


def reference() -> list[Gradients]:
    return shares()


def right(rank: Any, scale_grads: bool = False) -> Gradients:
    model, stage = my_stage(rank)
    share = CALLS if scale_grads else CALLS * 2
    schedule = ScheduleGPipe(stage, 2, lambda out, y: cross_entropy(out, y) / share, scale_grads=scale_grads)
    for x, y in zip(*(z.flatten(0, 1) for z in batch()), strict=True):
        schedule.step(x) if rank.rank == 0 else schedule.step(target=y)
    return all_gradients(model)


def wrong(rank: Any) -> Gradients:
    return right(rank, scale_grads=True)
