"""Each rank of tp sends its slice of tokens through experts, and the gate's gradients are not summed over slices."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from unisono import gradients_of
from unisono_contrib.zoo.split import CopyToRanks, SumOverRanks
from unisono_contrib.zoo.toys import Gradients, TwoExperts, batch

ADDRESS = "pytorch/torchtitan#2387"
STACK = "experts, tokens cut over tp"
CAUSE = "not_reduced"


def _loss(model: TwoExperts, rank: Any = None, copy: Any = None) -> Tensor:
    x, y = (z[0].flatten(0, 1) for z in batch())
    scores = model.gate(x)
    routed = scores if rank is None else copy(scores)
    outputs = torch.stack([row @ model.experts.detach()[i % 2] for i, row in enumerate(routed)])
    if rank is not None:
        mine = torch.zeros(len(x), 1)
        mine.chunk(rank.world)[rank.rank].fill_(1)
        outputs = SumOverRanks.apply(outputs * mine)
    return cross_entropy(model.head(outputs.tanh()), y)


def reference() -> Gradients:
    return _gradients(_loss(model := TwoExperts()), model)


def right(rank: Any, copy: Any = CopyToRanks.apply) -> Gradients:
    return _gradients(_loss(model := TwoExperts(), rank, copy), model)


def wrong(rank: Any) -> Gradients:
    return right(rank, copy=lambda scores: scores)


def _gradients(loss: Tensor, model: nn.Module) -> Gradients:
    loss.backward()
    return gradients_of(model)
