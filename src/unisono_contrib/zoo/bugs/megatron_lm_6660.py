"""Where a buffer's group has one rank, the sum has the buffer itself as its input, so each micro-batch doubles what is there."""

from typing import Any

import torch
from torch.distributed.tensor import Shard
from torch.nn.functional import cross_entropy

from unisono import gradients_of
from unisono_contrib.zoo.toys import MICROS, Gradients, TwoExperts, mean_over_ranks, micro_batches, shares

ADDRESS, STACK, CAUSE = "NVIDIA/Megatron-LM#6660", "experts, sharded gradients", "rescaled_each_micro_batch"
LAYOUT = {"experts": Shard(0)}


def reference() -> list[Gradients]:
    return shares(TwoExperts)


def right(rank: Any, aliased: bool = False) -> Gradients:
    model = TwoExperts(spread=rank)
    buffer = torch.zeros_like(model.experts)  # of a group of one rank: this rank alone has this expert
    for _, x, y in micro_batches(rank):
        model.experts.grad = None
        (cross_entropy(model(x), y) / MICROS).backward()
        assert model.experts.grad is not None
        reduced = buffer.add_(model.experts.grad) if aliased else model.experts.grad
        buffer += reduced
    dense = mean_over_ranks({n: g for n, g in gradients_of(model).items() if n != "experts"})
    return {**dense, "experts": buffer / rank.world}


def wrong(rank: Any) -> Gradients:
    return right(rank, aliased=True)
