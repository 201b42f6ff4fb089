"""DDP meets on the data-parallel group, which has one rank where the rest of the ranks split the sequence."""

from typing import Any

import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from unisono import gradients_of
from unisono_contrib.zoo.toys import Gradients, batch, network, shares

ADDRESS = "ByteDance-Seed/VeOmni#1059"
STACK = "DDP, sequence parallel"
CAUSE = "not_reduced"


def reference() -> list[Gradients]:
    return shares()


def right(rank: Any, whole_mesh: bool = True) -> Gradients:
    groups = [dist.new_group([r]) for r in range(rank.world)]  # dp = 1 beside a sequence cut in two
    group = dist.group.WORLD if whole_mesh else groups[rank.rank]
    model, (x, y) = DistributedDataParallel(network(), process_group=group), batch()
    cross_entropy(model(x[rank.rank].flatten(0, 1)), y[rank.rank].flatten()).backward()
    return gradients_of(model)


def wrong(rank: Any) -> Gradients:
    return right(rank, whole_mesh=False)
