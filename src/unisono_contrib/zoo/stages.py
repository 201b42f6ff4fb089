"""The toys' network in two stages of torch's pipelining."""

from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from unisono import gradients_of
from unisono_contrib.zoo.toys import Gradients, network


def my_stage(rank: Any) -> tuple[nn.Module, PipelineStage]:
    """Return the layers of this rank, by their names in the whole network, and their stage."""
    layers = list(network().named_children())
    model = nn.Sequential(OrderedDict(layers[:2] if rank.rank == 0 else layers[2:]))
    return model, PipelineStage(model, rank.rank, 2, torch.device("cpu"))


def all_gradients(model: nn.Module) -> Gradients:
    """Return the gradients of all stages, on each rank."""
    stages: list[Gradients] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(stages, gradients_of(model))
    return {name: x for stage in stages for name, x in stage.items()}
