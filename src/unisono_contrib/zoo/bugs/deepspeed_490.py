"""ZeRO cuts the flat weights into equal parts, and LAMB takes the trust ratio of such a part, not of a layer."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono_contrib.zoo.toys import Gradients, mean_over_ranks, summed
from unisono_contrib.zoo.toys_update import MuonStep, my_gradients

ADDRESS = "deepspeedai/DeepSpeed#490"
STACK = "LAMB under ZeRO by hand"
CAUSE = "partial_norm"


class LayerRates(Optimizer):
    """The layer-wise rate of LAMB (1904.00962) over plain gradients."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.data.sub_(0.1 * _trusted(p.data, p.grad))


def _trusted(weight: Tensor, update: Tensor) -> Tensor:
    return update * weight.norm() / update.norm()


class LayerRatesStep(MuonStep):
    """The network without biases, by that."""

    def optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        return LayerRates(params)


Step = LayerRatesStep


def right(rank: Any, by_part: bool = False) -> Gradients:
    model = Step().model()
    gradients, new = mean_over_ranks(my_gradients(Step(), model, rank)), {}
    for name, p in model.named_parameters():
        pairs = zip(*(x.detach().chunk(2 if by_part else 1) for x in (p, gradients[name])), strict=True)
        new[name] = torch.cat([w - 0.1 * _trusted(w, g) for w, g in pairs])
    return {name: summed(x) / rank.world for name, x in new.items()}


def wrong(rank: Any) -> Gradients:
    return right(rank, by_part=True)
