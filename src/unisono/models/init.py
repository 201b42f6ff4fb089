"""Initial weights that depend on the seed and the parameter's logical name alone.

A stage, a shard or a tensor-parallel slice draws the whole tensor from its name's own generator and keeps its
part, so every layout begins from the same model, and nothing has to be broadcast.
"""

import math
from collections.abc import Callable, Mapping
from hashlib import blake2b

import torch
from torch import Tensor, nn

Rule = tuple[str, float]  # ("normal", std) | ("zeros", 0) | ("ones", 0) | ("uniform", bound)


def draw(name: str, shape: tuple[int, ...], rule: Rule, seed: int) -> Tensor:
    """The full initial tensor called `name`, float32 on the CPU."""
    kind, scale = rule
    if kind == "zeros":
        return torch.zeros(shape)
    if kind == "ones":
        return torch.ones(shape)
    key = blake2b(
        f"{seed} {name}".encode(), digest_size=4
    ).digest()  # 32 bits: torch's CPU generator takes no more
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little"))
    if kind == "normal":
        return torch.empty(shape).normal_(0.0, scale, generator=generator)
    if kind == "uniform":
        return torch.empty(shape).uniform_(-scale, scale, generator=generator)
    raise ValueError(f"unknown initialisation {kind!r} for {name}")


def default_rules(model: nn.Module) -> dict[str, Rule]:
    """Rules for modules that state none: torch's usual bounds for Linear and Conv, ones and zeros for norms."""
    rules: dict[str, Rule] = {}
    for prefix, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter):
            continue
        dot = f"{prefix}." if prefix else ""
        if weight.dim() == 1:
            rules[f"{dot}weight"] = ("ones", 0.0)
        elif isinstance(module, nn.Embedding):
            rules[f"{dot}weight"] = ("normal", 1.0)
        else:
            fan_in = weight[0].numel()
            rules[f"{dot}weight"] = ("uniform", 1.0 / math.sqrt(fan_in))
        if isinstance(getattr(module, "bias", None), nn.Parameter):
            rules[f"{dot}bias"] = ("zeros", 0.0)
    return rules


def rules_of(model: nn.Module) -> Mapping[str, Rule]:
    """The model's own rules (`model.initial_rules()`), completed by the defaults."""
    initial: Callable[[], Mapping[str, Rule]] | None = getattr(model, "initial_rules", None)
    return {**default_rules(model), **(initial() if initial else {})}


@torch.no_grad()
def initialise(model: nn.Module, seed: int, rules: Mapping[str, Rule] | None = None) -> None:
    """Fill a whole, uncut model in place. Raises ValueError for a parameter without a rule."""
    rules = rules_of(model) if rules is None else rules
    for name, parameter in model.named_parameters():
        if name not in rules:
            raise ValueError(f"no initialisation rule for {name}")
        parameter.copy_(draw(name, tuple(parameter.shape), rules[name], seed))
