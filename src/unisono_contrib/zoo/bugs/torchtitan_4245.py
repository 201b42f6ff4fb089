"""Each rank adds the whole bias to its output before the outputs of tp ranks are summed."""

from typing import Any

from unisono_contrib.zoo.split import LAYOUT as LAYOUT
from unisono_contrib.zoo.split import split_layers, whole_layers
from unisono_contrib.zoo.toys import Gradients

ADDRESS = "pytorch/torchtitan#4245"
STACK = "tensor parallel by hand"
CAUSE = "bias_added_by_each_rank"
reference = whole_layers
right = split_layers


def wrong(rank: Any) -> Gradients:
    return split_layers(rank, share=lambda bias, _: bias)
