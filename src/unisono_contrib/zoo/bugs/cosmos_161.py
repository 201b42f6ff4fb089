"""The context that defers the sum of gradients knows DDP alone; under FSDP2 each micro-batch sums them again."""

from contextlib import nullcontext
from typing import Any

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from unisono import gradients_of
from unisono_contrib.zoo.toys import MICROS, Gradients, micro_batches, network, shares

ADDRESS = "NVIDIA/cosmos-framework#161"
STACK = "FSDP2, accumulation"
CAUSE = "summed_too_often"
MEETS = 1


def reference() -> list[Gradients]:
    return shares()


def right(rank: Any, knows_fsdp: bool = True) -> Gradients:
    model: Any = fully_shard(network(), mesh=init_device_mesh("cpu", (rank.world,)))
    is_ddp = isinstance(model, DistributedDataParallel)
    for m, x, y in micro_batches(rank):
        deferred = m < MICROS - 1
        if knows_fsdp and not is_ddp:
            model.set_requires_gradient_sync(not deferred)
        with model.no_sync() if deferred and is_ddp else nullcontext():
            (cross_entropy(model(x), y) / MICROS).backward()
    return gradients_of(model)


def wrong(rank: Any) -> Gradients:
    return right(rank, knows_fsdp=False)
