"""In a group of one rank the sum's input is the buffer itself, so each micro-batch doubles what is there."""

from typing import Any

import torch
from torch.distributed.tensor import Shard
from torch.nn.functional import cross_entropy

from unisono import gradients_of
from unisono_contrib.zoo.toys import MICROS, Gradients, TwoExperts, mean_over_ranks, micro_batches, shares

ADDRESS = "NVIDIA/Megatron-LM#6660"
STACK = "experts, sharded gradients"
CAUSE = "rescaled_each_micro_batch"
LAYOUT = {"experts": Shard(0)}


def reference() -> list[Gradients]:
    return shares(TwoExperts)


def right(rank: Any, aliased: bool = False) -> Gradients:
    model = TwoExperts(spread=rank)
    buffer = torch.zeros_like(model.experts)  # of a group of one rank: this rank alone has this expert
    for _, x, y in micro_batches(rank):
        model.experts.grad = None
        (cross_entropy(model(x), y) / MICROS).backward()
        gradient = gradients_of(model)["experts"]
        buffer += buffer.add_(gradient) if aliased else gradient
    dense = mean_over_ranks({n: g for n, g in gradients_of(model).items() if n != "experts"})
    return {**dense, "experts": buffer / rank.world}


def wrong(rank: Any) -> Gradients:
    return right(rank, aliased=True)
