"""An expert sees the tokens of all ranks, and its gradient is their sum where the rest of the model takes the mean."""

from typing import Any

from torch.distributed.tensor import Shard
from torch.nn.functional import cross_entropy

from unisono import gradients_of
from unisono_contrib.zoo.toys import MICROS, Gradients, TwoExperts, mean_over_ranks, micro_batches, shares

ADDRESS = "pytorch/pytorch#160285"
STACK = "experts, data parallel"
CAUSE = "factor_of_axis"
LAYOUT = {"experts": Shard(0)}


def reference() -> list[Gradients]:
    return shares(TwoExperts)


def right(rank: Any, divided: bool = True) -> Gradients:
    model = TwoExperts(spread=rank)
    for _, x, y in micro_batches(rank):
        (cross_entropy(model(x), y) / MICROS).backward()
    gradients = gradients_of(model)
    experts = gradients.pop("experts")
    return {**mean_over_ranks(gradients), "experts": experts / rank.world if divided else experts}


def wrong(rank: Any) -> Gradients:
    return right(rank, divided=False)
