"""Without ep the gradients that come back out of the cut experts are taken as they are, and never summed over tp."""

from typing import Any

from unisono_contrib.zoo.split import LAYOUT as LAYOUT
from unisono_contrib.zoo.split import split_layers, whole_layers
from unisono_contrib.zoo.toys import Gradients

ADDRESS = "pytorch/torchtitan#4054"
STACK = "tensor parallel by hand"
CAUSE = "not_reduced"
reference = whole_layers
right = split_layers


def wrong(rank: Any) -> Gradients:
    return split_layers(rank, copy=lambda x: x)
