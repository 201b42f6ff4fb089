"""A peer that is alone does not average, and its optimiser steps by the averaged gradients, which are still zero."""

from typing import Any

import torch

from unisono_contrib.zoo.toys import Gradients, mean_over_ranks
from unisono_contrib.zoo.toys_update import ToyStep as Step
from unisono_contrib.zoo.toys_update import my_gradients, set_gradients, weights_of

ADDRESS = "learning-at-home/hivemind#450"
STACK = "averager beside the optimiser"
CAUSE = "not_updated"


def right(rank: Any, peers: int = 2) -> Gradients:
    model = Step().model()
    mine = my_gradients(Step(), model, rank)
    averaged = {name: torch.zeros_like(g) for name, g in mine.items()}
    if peers > 1:
        averaged = mean_over_ranks(mine)
    set_gradients(model, averaged)
    Step().optimizer(model.parameters()).step()
    return weights_of(model)


def wrong(rank: Any) -> Gradients:
    return right(rank, peers=1)
