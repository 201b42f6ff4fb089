"""With accumulation by hand each backward is a boundary, at which ZeRO-2 drops the sum of the micro-batches before."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from unisono import gradients_of
from unisono_contrib.zoo.toys import MICROS, Gradients, micro_batches, network, shares, summed

ADDRESS = "allenai/open-instruct#1498"
STACK = "ZeRO-2 by hand"
CAUSE = "missing_micro_batch"


def reference() -> list[Gradients]:
    return shares()


def right(rank: Any, accumulation: int = MICROS) -> Gradients:
    model = network()
    sums: Tensor | None = None
    shard = torch.empty(0)  # this rank's part of the flat gradient
    for m, x, y in micro_batches(rank):
        model.zero_grad()
        (cross_entropy(model(x), y) / MICROS).backward()
        flat = torch.cat([g.flatten() for g in gradients_of(model).values()])
        sums = flat if sums is None else sums + flat
        if (m + 1) % accumulation == 0:
            shard = (summed(sums) / rank.world).tensor_split(rank.world)[rank.rank]
            sums = None
    full = torch.zeros_like(flat)
    full.tensor_split(rank.world)[rank.rank].copy_(shard)
    sizes = {name: p.shape for name, p in model.named_parameters()}
    pieces = summed(full).split([size.numel() for size in sizes.values()])
    return {name: x.view(size) for (name, size), x in zip(sizes.items(), pieces, strict=True)}


def wrong(rank: Any) -> Gradients:
    return right(rank, accumulation=1)
