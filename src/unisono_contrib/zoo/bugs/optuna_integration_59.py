"""Each rank runs the search by itself, so each trains with a learning rate of its own."""

from typing import Any

import torch

from unisono_contrib.zoo.toys import Gradients, mean_over_ranks
from unisono_contrib.zoo.toys_update import ToyStep as Step
from unisono_contrib.zoo.toys_update import my_gradients, set_gradients, weights_of

ADDRESS = "optuna/optuna-integration#59"
STACK = "DDP, search on each rank"
CAUSE = "replicas_drifted"


def right(rank: Any, rate: float = 0.1) -> Gradients:
    model = Step().model()
    set_gradients(model, mean_over_ranks(my_gradients(Step(), model, rank)))
    torch.optim.SGD(model.parameters(), lr=rate).step()
    return weights_of(model)


def wrong(rank: Any) -> Gradients:
    return right(rank, rate=(0.1, 0.03)[rank.rank])  # what each rank's sampler has drawn
