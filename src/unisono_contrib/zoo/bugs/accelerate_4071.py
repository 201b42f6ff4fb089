"""A loader that skips the batches of before starts its own count of epochs, so a resume reads the order of epoch 0."""

from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from unisono import gradients_of
from unisono_contrib.zoo.toys import Gradients, batch, network

ADDRESS = "huggingface/accelerate#4071"
STACK = "DDP, data loader resumed"
CAUSE = "wrong_samples"
EPOCH, DONE, SIZE = 1, 6, 4  # samples of this epoch that a rank has read, and those of its next batch


def _next(rank: int, epoch: int) -> list[int]:
    sampler = DistributedSampler(range(36), num_replicas=2, rank=rank, seed=7)  # type: ignore[arg-type]
    sampler.set_epoch(epoch)
    return list(sampler)[DONE : DONE + SIZE]


def reference() -> list[Gradients]:
    x, y = batch()[0].flatten(0, 2), batch()[1].flatten()
    parts: list[Gradients] = []
    for i in (*_next(0, EPOCH), *_next(1, EPOCH)):
        model = network()
        (cross_entropy(model(x[i : i + 1]), y[i : i + 1]) / (2 * SIZE)).backward()
        parts.append(gradients_of(model))
    return parts


def right(rank: Any, epoch: int = EPOCH) -> Gradients:
    x, y = batch()[0].flatten(0, 2), batch()[1].flatten()
    model, chosen = DistributedDataParallel(network()), torch.tensor(_next(rank.rank, epoch))
    cross_entropy(model(x[chosen]), y[chosen]).backward()
    return gradients_of(model)


def wrong(rank: Any) -> Gradients:
    return right(rank, epoch=0)
