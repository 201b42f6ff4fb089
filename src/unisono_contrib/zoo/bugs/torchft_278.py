"""The offset moves on by the bucket's size and not by what was packed, so a tensor that does not fit is never sent."""

from typing import Any

from torch.nn.functional import cross_entropy

from unisono import gradients_of
from unisono_contrib.zoo.toys import Gradients, batch, network, shares, summed

ADDRESS = "meta-pytorch/torchft#278"
STACK = "buckets by hand (torchft 0.2.0)"
CAUSE = "not_reduced"
CAP = 260  # elements of a bucket; the largest tensor has 256


def reference() -> list[Gradients]:
    return shares()


def right(rank: Any, by_packed: bool = True) -> Gradients:
    model, (x, y) = network(), batch()
    cross_entropy(model(x[rank.rank].flatten(0, 1)), y[rank.rank].flatten()).backward()
    gradients = {name: g.clone() for name, g in gradients_of(model).items()}
    left, offset, total = list(gradients.values()), 0, sum(g.numel() for g in gradients.values())
    while offset < total:
        room = size = min(CAP, total - offset)
        while left and left[0].numel() <= room:
            room -= left[0].numel()
            g = left.pop(0)
            g.copy_(summed(g) / rank.world)
        offset += size - room if by_packed else size
    return gradients


def wrong(rank: Any) -> Gradients:
    return right(rank, by_packed=False)
