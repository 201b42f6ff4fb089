"""`state_dict`s as one device has them, of models and optimisers whose parameters are shards.

Other libraries write and read these themselves. `whole_model` and `whole_optimizer` are called by all ranks and give
each of them whole tensors. `load_state_dict` of what `prepare` has sharded takes whole tensors.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


@torch.no_grad()
def whole_model(model: nn.Module) -> dict[str, Any]:
    """model.state_dict() with whole tensors. A weight under two names stays one tensor."""
    owner = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    known: dict[Any, Tensor] = {}
    found: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        if isinstance(value, DTensor):
            key = owner.get(name, name)
            if key not in known:
                known[key] = value.full_tensor()
            value = known[key]
        found[name] = value
    return found


@torch.no_grad()
def whole_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """optimizer.state_dict() with whole tensors, on every rank."""
    made = optimizer.state_dict()
    state = {
        number: {key: x.full_tensor() if isinstance(x, DTensor) else x for key, x in own.items()}
        for number, own in made["state"].items()
    }
    return {**made, "state": state}


def take_whole(model: nn.Module) -> None:
    """Have `load_state_dict` of a sharded model take whole tensors too."""

    def dealt(own: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, p in own.named_parameters(remove_duplicate=False):
            key = prefix + name
            if key in state:
                state[key] = _like(state[key], p)

    model.register_load_state_dict_pre_hook(dealt)


def take_whole_state(optimizer: Optimizer) -> None:
    """The same of an optimiser that steps shards."""
    optimizer.register_load_state_dict_pre_hook(_dealt_state)


def _dealt_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    numbers = [n for group in state["param_groups"] for n in group["params"]]
    live = [p for group in optimizer.param_groups for p in group["params"]]
    owner = dict(zip(numbers, live, strict=False))
    dealt = {n: _like_all(own, owner.get(n)) for n, own in state["state"].items()}
    return {**state, "state": dealt}


def _like_all(values: Any, p: Any) -> Any:
    if not isinstance(values, Mapping):
        return values
    return {key: _like(x, p) for key, x in values.items()}


@torch.no_grad()
def _like(x: Any, p: Any) -> Any:
    """x as p is: this rank's shard of it, if p is a shard and x has p's shape."""
    if not isinstance(p, DTensor) or not isinstance(x, Tensor) or isinstance(x, DTensor):
        return x
    if tuple(x.shape) != tuple(p.shape):
        return x
    device = p.to_local().device
    return distribute_tensor(x.detach().to(device), p.device_mesh, p.placements, src_data_rank=None)
