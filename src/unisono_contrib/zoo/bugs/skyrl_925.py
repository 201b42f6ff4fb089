"""Each worker divides by the tokens of its own mini-batch, and DDP takes the mean over workers with unlike numbers."""

from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from unisono import gradients_of
from unisono_contrib.zoo.toys import NOTHING, Gradients, micro_batches, network, shares, summed

ADDRESS = "NovaSky-AI/SkyRL#925"
STACK = "DDP, policy loss"
CAUSE = "mean_of_means"


def reference() -> list[Gradients]:
    return shares(uneven=True)


def right(rank: Any, of_all: bool = True) -> Gradients:
    model = DistributedDataParallel(network())
    _, xs, ys = zip(*micro_batches(rank, uneven=True), strict=True)
    x, y = torch.cat(xs), torch.cat(ys)
    tokens = (y != NOTHING).sum()
    (
        cross_entropy(model(x), y, reduction="sum") / (summed(tokens) / rank.world if of_all else tokens)
    ).backward()
    return gradients_of(model)


def wrong(rank: Any) -> Gradients:
    return right(rank, of_all=False)
