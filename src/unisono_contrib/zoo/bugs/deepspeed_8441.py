"""Newton-Schulz lives in the ZeRO optimisers, so without ZeRO, the default, Muon's step is a step of SGD."""

from typing import Any

import torch

from unisono_contrib.zoo.toys import Gradients, mean_over_ranks
from unisono_contrib.zoo.toys_update import MuonStep as Step
from unisono_contrib.zoo.toys_update import my_gradients, set_gradients, weights_of

ADDRESS = "deepspeedai/DeepSpeed#8441"
STACK = "Muon without ZeRO"
CAUSE = "optimizer_is_sgd"


def right(rank: Any, orthogonal: bool = True) -> Gradients:
    model = Step().model()
    set_gradients(model, mean_over_ranks(my_gradients(Step(), model, rank)))
    if orthogonal:
        Step().optimizer(model.parameters()).step()
    else:
        for p in model.parameters():  # the step that trusts ZeRO to have done the rest
            p.data.add_(p.grad if p.grad is not None else torch.zeros_like(p), alpha=-0.02)
    return weights_of(model)


def wrong(rank: Any) -> Gradients:
    return right(rank, orthogonal=False)
