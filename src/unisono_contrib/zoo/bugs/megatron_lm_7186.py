"""`no_sync` does nothing, so each micro-batch counts as the last one and clears what was there before it."""

from typing import Any

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from unisono import gradients_of
from unisono_contrib.zoo.toys import MICROS, Gradients, micro_batches, network, shares

ADDRESS = "NVIDIA/Megatron-LM#7186"
STACK = "FSDP2"
CAUSE = "missing_micro_batch"


def reference() -> list[Gradients]:
    return shares()


def right(rank: Any, is_last: Any = lambda m: m == MICROS - 1) -> Gradients:
    model: Any = fully_shard(network(), mesh=init_device_mesh("cpu", (rank.world,)))
    started = False  # whether the accumulation buffer holds micro-batches of this step
    for m, x, y in micro_batches(rank):
        if not started:
            model.zero_grad()
        (cross_entropy(model(x), y) / MICROS).backward()
        started = not is_last(m)  # the last one closes the buffer, and the next begins anew
    return gradients_of(model)


def wrong(rank: Any) -> Gradients:
    return right(rank, is_last=lambda m: True)
