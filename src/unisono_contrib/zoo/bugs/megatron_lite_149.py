"""Micro-batches are added up in the model's bfloat16, and turned into float32 only when ranks meet."""

from typing import Any

import torch
from torch.nn.functional import cross_entropy

from unisono import gradients_of
from unisono_contrib.zoo.toys import MICROS, Gradients, mean_over_ranks, micro_batches, network, shares

ADDRESS = "ISEEKYAN/Megatron-LM#149"
STACK = "sharded gradients, accumulation"
CAUSE = "precision_lost"


def reference() -> list[Gradients]:
    return shares()


def right(rank: Any, dtype: torch.dtype = torch.float64) -> Gradients:
    model = network()
    sums = {name: torch.zeros_like(p, dtype=dtype) for name, p in model.named_parameters()}
    for _, x, y in micro_batches(rank):
        model.zero_grad()
        (cross_entropy(model(x), y) / MICROS).backward()
        for name, gradient in gradients_of(model).items():
            sums[name] += gradient.to(dtype)
    return mean_over_ranks({name: x.to(torch.float64) for name, x in sums.items()})


def wrong(rank: Any) -> Gradients:
    return right(rank, dtype=torch.bfloat16)
