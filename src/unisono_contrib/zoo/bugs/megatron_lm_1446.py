"""Each rank of tp normalises its part of the sequence, and the gradients of the norm's weights stay its own."""

from typing import Any

from torch import nn
from torch.nn.functional import cross_entropy

from unisono import gradients_of
from unisono_contrib.zoo.toys import Gradients, batch, network, summed

ADDRESS = "NVIDIA/Megatron-LM#1446"
STACK = "sequence parallel by hand"
CAUSE = "not_reduced"


def _model() -> nn.Module:
    layers = list(network().children())
    return nn.Sequential(*layers[:4], nn.LayerNorm(16), layers[4])


def _gradients(part: slice, targets: int) -> Gradients:
    model, (x, y) = _model(), (z[0].flatten(0, 1) for z in batch())
    (cross_entropy(model(x[part]), y[part], reduction="sum") / targets).backward()
    return gradients_of(model)


def reference() -> Gradients:
    length = batch()[1][0].numel()
    return _gradients(slice(length), length)


def right(rank: Any, norms_too: bool = True) -> Gradients:
    length = batch()[1][0].numel()
    size = length // rank.world
    gradients = _gradients(slice(rank.rank * size, (rank.rank + 1) * size), length)
    norm = ("4.weight", "4.bias")  # the rest is summed by the collectives of the layers themselves
    return {name: g if name in norm and not norms_too else summed(g) for name, g in gradients.items()}


def wrong(rank: Any) -> Gradients:
    return right(rank, norms_too=False)
