"""Each rank adds bias / tp to its output before the sum, and autograd divides the bias's gradient by tp as well."""

from typing import Any

from unisono_contrib.zoo.split import LAYOUT as LAYOUT
from unisono_contrib.zoo.split import split_layers, whole_layers
from unisono_contrib.zoo.toys import Gradients

ADDRESS = "pytorch/torchtitan#4332"
STACK = "tensor parallel by hand"
CAUSE = "factor_of_axis"
reference = whole_layers
right = split_layers


def wrong(rank: Any) -> Gradients:
    return split_layers(rank, share=lambda bias, tp: bias / tp)
