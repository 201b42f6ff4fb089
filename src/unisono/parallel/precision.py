"""Compute precision: master weights and optimiser stay as they are, matrix products run in bf16 or fp16 if asked."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

from unisono.comm.device import casting

HALF: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_of(precision: str) -> torch.dtype:
    """The dtype of parameters and optimiser state under a plan's `precision`."""
    return torch.float64 if precision == "fp64" else torch.float32


def computing(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context of a forward pass (Micikevicius et al., Mixed precision training, 2018)."""
    if precision in HALF:
        return torch.autocast(casting(device), dtype=HALF[precision])
    return nullcontext()
