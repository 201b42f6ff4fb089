"""Weights that a model's own code reads in float32, whatever their dtype: their gradients are added up in float32.

Gemma's norms do so. Where `tp` or `cp` deals positions, that sum has another order, and its error is one of float32 in
a proof of float64. So of these weights alone a proof in float64 asks what float32 allows.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class _Seen(TorchDispatchMode):
    """Notes which of some tensors are copied into float32."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names, self.found = names, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype is torch.float32 and args:
            name = self.names.get(id(args[0]))
            self.found |= {name} if name else set()
        return result


def read_in_float32(model: nn.Module, sample: Tensor) -> frozenset[str]:
    """Names of such weights of a model whose weights are float64. It is run once without numbers, and moved to the meta
    device for it; one that cannot be run so says nothing. sample: an input, on the meta device."""
    model.to("meta", torch.float64)
    seen = _Seen({id(parameter): name for name, parameter in model.named_parameters()})
    try:
        with seen, torch.no_grad():
            model(sample.double() if sample.is_floating_point() else sample)
    except Exception:  # a user's own code, which may ask for numbers
        return frozenset()
    return frozenset(seen.found)
