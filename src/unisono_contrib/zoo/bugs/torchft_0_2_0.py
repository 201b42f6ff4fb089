"""The offset moves on by the bucket's size and not by what was packed, so a tensor that does not fit is never sent."""

from typing import Any

import torch
from torch.nn.functional import cross_entropy

from unisono import gradients_of
from unisono_contrib.zoo.toys import Gradients, batch, network, shares, summed

ADDRESS = "meta-pytorch/torchft#278"
STACK = "buckets by hand (torchft 0.2.0)"
CAUSE = "not_reduced"
CAP = 150  # elements of a bucket


def reference() -> list[Gradients]:
    return shares()


def right(rank: Any, by_packed: bool = True) -> Gradients:
    model, (x, y) = network(), batch()
    cross_entropy(model(x[rank.rank].flatten(0, 1)), y[rank.rank].flatten()).backward()
    gradients = {name: g.clone() for name, g in gradients_of(model).items()}
    ends = torch.tensor([g.numel() for g in gradients.values()]).cumsum(0).tolist()
    starts, offset = [0, *ends[:-1]], 0
    while offset < ends[-1]:
        packed = [i for i, s in enumerate(starts) if s >= offset and ends[i] <= offset + CAP]
        if not packed:
            packed = [starts.index(offset)] if by_packed else []  # a large tensor goes alone
        bucket = [list(gradients.values())[i] for i in packed]
        for g in bucket:
            g.copy_(summed(g) / rank.world)
        offset = ends[packed[-1]] if by_packed else offset + CAP
    return gradients


def wrong(rank: Any) -> Gradients:
    return right(rank, by_packed=False)
