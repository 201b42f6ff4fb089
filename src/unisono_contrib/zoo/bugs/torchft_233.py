"""The pseudo-gradient of DiLoCo has the wrong sign, so outer steps undo what ranks have learned, and as much again."""

from typing import Any

import torch

from unisono_contrib.zoo.toys import Gradients, mean_over_ranks
from unisono_contrib.zoo.toys_update import ToyStep as Step
from unisono_contrib.zoo.toys_update import my_gradients, set_gradients, weights_of

ADDRESS = "meta-pytorch/torchft#233"
STACK = "DiLoCo, h=1, outer SGD"
CAUSE = "reversed"


def right(rank: Any, sign: int = 1) -> Gradients:
    model = Step().model()
    start = weights_of(model)
    set_gradients(model, my_gradients(Step(), model, rank))
    Step().optimizer(model.parameters()).step()
    learned = mean_over_ranks({name: start[name] - x for name, x in weights_of(model).items()})
    model.load_state_dict(start)
    set_gradients(model, {name: sign * x for name, x in learned.items()})
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return weights_of(model)


def wrong(rank: Any) -> Gradients:
    return right(rank, sign=-1)
