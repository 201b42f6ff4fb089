"""Ranks draw their initial weights from unlike seeds, and nobody sends those of one rank to the others."""

from typing import Any

import torch
from torch import nn

from unisono_contrib.zoo.toys import Gradients, mean_over_ranks
from unisono_contrib.zoo.toys_update import ToyStep as Step
from unisono_contrib.zoo.toys_update import my_gradients, set_gradients, weights_of

ADDRESS = "PrimeIntellect-ai/prime-diloco#13"
STACK = "DiLoCo, between outer steps"
CAUSE = "replicas_drifted"


def right(rank: Any, common_seed: bool = True) -> Gradients:
    model = Step().model()
    if not common_seed:
        torch.manual_seed(rank.rank)
        for layer in model.children():
            layer.reset_parameters() if isinstance(layer, nn.Linear) else None
    start = weights_of(model)
    set_gradients(model, mean_over_ranks(my_gradients(Step(), model, rank)))
    Step().optimizer(model.parameters()).step()
    moved = mean_over_ranks({name: x - start[name] for name, x in weights_of(model).items()})
    return {name: start[name] + x for name, x in moved.items()}


def wrong(rank: Any) -> Gradients:
    return right(rank, common_seed=False)
