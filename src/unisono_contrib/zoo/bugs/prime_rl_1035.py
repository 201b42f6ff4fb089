"""Rank 0's position in the data is saved for all ranks, so after a resume every rank reads what rank 0 reads."""

from typing import Any

import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from unisono import gradients_of
from unisono_contrib.zoo.toys import MICROS, Gradients, batch, network, shares

ADDRESS = "PrimeIntellect-ai/prime-rl#1035"
STACK = "DDP, data loader resumed"
CAUSE = "leaf_twice"


def reference() -> list[Gradients]:
    return shares()


def right(rank: Any, each_rank: bool = True) -> Gradients:
    positions: list[Any] = [None] * rank.world
    dist.all_gather_object(positions, {"next": rank.rank})
    checkpoint = {
        f"rank {r}": position for r, position in enumerate(positions if each_rank else positions[:1])
    }
    position = checkpoint.get(f"rank {rank.rank}", checkpoint["rank 0"])["next"]  # resumed
    x, y = (z[position].flatten(0, 1) for z in batch())
    model = DistributedDataParallel(network())
    for samples, targets in zip(x.chunk(MICROS), y.chunk(MICROS), strict=True):
        (cross_entropy(model(samples), targets) / MICROS).backward()
    return gradients_of(model)


def wrong(rank: Any) -> Gradients:
    return right(rank, each_rank=False)
