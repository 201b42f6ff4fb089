"""Numbers of a foreign model that nothing learns: rotary frequencies, scales, indices.

The library keeps them as buffers, which are lost where a model is made without memory. They are computed here by the
model's own rule, kept beside the modules, and follow the device of what the modules are given.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from unisono.spec.errors import UsageError

_GROWING = ("dynamic", "longrope")
"""Rotary positions whose frequencies depend on what has been seen."""


def keep_constants(model: Any) -> None:
    """Take all buffers out of a model of transformers on the meta device. Raises UsageError P12 for one that a
    checkpoint would have to hold."""
    for name, module in model.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        lasting = set(buffers) - module._non_persistent_buffers_set
        if lasting:
            what = f"{name}.{min(lasting)} changes while the model learns, and is no weight"
            raise UsageError(what, where="model.kind", fix="a model without such numbers", code="P12")
        if getattr(module, "rope_type", "default") in _GROWING:
            what = f"{name}: rotary positions of type {module.rope_type} depend on the length of the longest text"
            raise UsageError(what, where="model.kind", fix="another rope_type in config.json", code="P12")
        if buffers:
            values = _values(model, module, buffers)
            for key in buffers:
                del module._buffers[key]
                setattr(module, key, values[key])
            module.constants = values
            module.register_forward_pre_hook(_follow, with_kwargs=True)


def _values(model: Any, module: nn.Module, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the model's own rule for initial weights says of them."""
    for key, buffer in buffers.items():
        module._buffers[key] = torch.zeros(buffer.shape, dtype=buffer.dtype, device="cpu")
    with torch.device("cpu"), torch.no_grad():
        model._init_weights(module)
    return {key: module._buffers[key] for key in buffers}  # type: ignore[misc]


def _follow(module: Any, args: Any, kwargs: Any) -> None:
    """To the device of the first tensor that the module is given."""
    device = next((x.device for x in _tensors((*args, *kwargs.values()))), None)
    for key, value in module.constants.items():
        if device is not None and getattr(module, key).device != device:
            setattr(module, key, value.to(device))


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
