"""Each micro-batch divides its loss by its own number of tokens, and the step takes the mean of these means."""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from unisono import gradients_of
from unisono_contrib.zoo.toys import MICROS, NOTHING, Gradients, micro_batches, network, shares, summed

ADDRESS = "huggingface/transformers#24725"
STACK = "DDP, accumulation"
CAUSE = "mean_of_means"


def reference() -> list[Gradients]:
    return shares(uneven=True)


def right(rank: Any, weigh: Any = None) -> Gradients:
    model = DistributedDataParallel(network())
    rows = list(micro_batches(rank, uneven=True))
    counts = torch.stack([(y != NOTHING).sum() for _, _, y in rows])
    tokens = summed(counts.sum()) / dist.get_world_size()
    for m, x, y in rows:
        model.require_backward_grad_sync = m == MICROS - 1
        loss = cross_entropy(model(x), y, reduction="sum")
        (loss / tokens if weigh is None else weigh(loss, y)).backward()
    return gradients_of(model)


def wrong(rank: Any) -> Gradients:
    return right(rank, weigh=lambda loss, y: loss / (y != NOTHING).sum() / MICROS)
