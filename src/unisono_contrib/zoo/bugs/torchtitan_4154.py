"""The loads of experts, from which their routing bias follows, are summed over data-parallel ranks but not over tp."""

from typing import Any

import torch
from torch import Tensor

from unisono_contrib.zoo.toys import Gradients, batch, summed

ADDRESS = "pytorch/torchtitan#4154"
STACK = "experts, sequence cut over tp"
CAUSE = "not_reduced"


def _loads(tokens: Tensor) -> Tensor:
    """How many tokens choose each of 8 experts."""
    scores = tokens @ torch.randn(6, 8, generator=torch.Generator().manual_seed(5))
    return scores.topk(2).indices.flatten().bincount(minlength=8).to(tokens.dtype)


def reference() -> Gradients:
    return {"loads": _loads(batch()[0].flatten(0, 2))}


def right(rank: Any, reduce: Any = summed) -> Gradients:
    return {"loads": reduce(_loads(batch()[0][rank.rank].flatten(0, 1)))}  # tp cuts the sequence


def wrong(rank: Any) -> Gradients:
    return right(rank, reduce=lambda loads: loads)
