"""A sampler that wakes up loads its weights from disk again, over those that the trainer has just sent."""

from typing import Any

import torch.distributed as dist

from unisono_contrib.zoo.toys import Gradients, mean_over_ranks
from unisono_contrib.zoo.toys_update import ToyStep as Step
from unisono_contrib.zoo.toys_update import my_gradients, set_gradients, weights_of

ADDRESS = "huggingface/trl#5312"
STACK = "trainer and sampler"
CAUSE = "not_updated"


def right(rank: Any, reloads: bool = False) -> Gradients:
    """Return the weights by which each rank's sampler generates after a step."""
    trainer, sampler = Step().model(), Step().model()
    on_disk = weights_of(sampler)
    set_gradients(trainer, mean_over_ranks(my_gradients(Step(), trainer, rank)))
    Step().optimizer(trainer.parameters()).step()
    for x, y in zip(sampler.parameters(), trainer.parameters(), strict=True):
        x.data.copy_(y)
        dist.broadcast(x.data, 0)
    if reloads:
        sampler.load_state_dict(on_disk)
    return weights_of(sampler)


def wrong(rank: Any) -> Gradients:
    return right(rank, reloads=True)
