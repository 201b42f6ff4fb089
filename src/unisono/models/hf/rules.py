"""Initial weights of a foreign model as rules: its own `_init_weights` is run without numbers, and watched.

What it draws is not taken, for that would depend on the order of the draws: each weight is drawn by its own name.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from unisono.models.init import Rule, default_rules

_AT = torch.ops.aten


class _Noted(TorchDispatchMode):
    """Which rule fills each tensor; the last one holds."""

    def __init__(self) -> None:
        super().__init__()
        self.rules: dict[int, Rule] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[override]
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor):
            self._note(func, id(args[0]), args[1:], kwargs)
        return func(*args, **kwargs)

    def _note(self, func: Any, at: int, args: Any, kwargs: Any) -> None:
        if func is _AT.normal_.default:
            self.rules[at] = ("normal", float(args[1] if len(args) > 1 else kwargs.get("std", 1.0)))
        elif func is _AT.uniform_.default:
            self.rules[at] = ("uniform", abs(float(args[1] if len(args) > 1 else 1.0)))
        elif func is _AT.erfinv_.default:
            self.rules[at] = (
                "normal",
                1.0,
            )  # a uniform number becomes a normal one, cut off at some deviations
        elif func is _AT.mul_.Tensor and self.rules.get(at, ("", 0))[0] == "normal":
            kind, scale = self.rules[at]
            self.rules[at] = (kind, scale * abs(float(args[0])) / math.sqrt(2.0))
        elif func is _AT.zero_.default:
            self.rules[at] = ("zeros", 0.0)
        elif func is _AT.fill_.Scalar:
            self.rules[at] = ("ones" if float(args[0]) == 1.0 else "zeros", 0.0)


def rules_seen(model: Any) -> Mapping[str, Rule]:
    """The library's name → rule, for a model of transformers on the meta device."""
    noted = _Noted()
    with torch.no_grad(), noted:
        nn.Module.apply(model, model._init_weights)  # parts before what holds them, which may change them
    rules = default_rules(model)
    for name, parameter in model.named_parameters():
        if id(parameter) in noted.rules:
            rules[name] = noted.rules[id(parameter)]
    return rules
