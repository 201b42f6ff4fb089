"""`copy.deepcopy` of a sharded model, as an average of weights (EMA) or a target network makes it: a sharded copy.

FSDP2 refuses to copy its modules. So the copy is made of plain modules with empty whole parameters, sharded in the same
way, and given the shards of the original. Nothing is sent. Ranks copy together, as they do everything.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from unisono.parallel.params import local_of

Shard = Callable[[nn.Module, Sequence[nn.Module]], object]
"""(copy, its blocks): shard it as its original is."""

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def copied_with_shards(model: nn.Module, shard: Shard) -> None:
    """Have deepcopy of this sharded model make a sharded copy."""

    def copied(memo: dict[int, Any]) -> nn.Module:
        blocks = [m for m in model.modules() if isinstance(m, FSDPModule) and m is not model]
        for p in model.parameters():
            local = local_of(p)
            empty = torch.empty(p.shape, dtype=p.dtype, device=local.device)
            memo.setdefault(id(p), nn.Parameter(empty, requires_grad=p.requires_grad))
        made = _plain(model, memo)
        for module in made.modules():
            for key, hook in list(module._load_state_dict_post_hooks.items()):
                if "FSDP" in getattr(hook, "__qualname__", ""):
                    del module._load_state_dict_post_hooks[key]
        shard(made, [memo[id(block)] for block in blocks])
        with torch.no_grad():
            for new, old in zip(made.parameters(), model.parameters(), strict=True):
                local_of(new).copy_(local_of(old))
        copied_with_shards(made, shard)
        return made

    for module in model.modules():
        if isinstance(module, FSDPModule):
            act = copied if module is model else _copier(module)
            module.__dict__["__deepcopy__"] = act


def _copier(module: nn.Module) -> Callable[[dict[int, Any]], nn.Module]:
    return lambda memo: _plain(module, memo)


def _plain(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy without FSDP2. memo: has its parameters already."""
    kind = next(base for base in type(module).__mro__[1:] if not issubclass(base, FSDPModule))
    made = nn.Module.__new__(kind)
    memo[id(module)] = made
    for name, value in module.__dict__.items():
        if name.startswith(
            ("__", "_is_fsdp", "_fsdp")
        ):  # FSDP2's own notes on a module, and our __deepcopy__
            continue
        made.__dict__[name] = copy.copy(value) if name in _HOOKS else copy.deepcopy(value, memo)
    for name in _HOOKS:
        hooks = made.__dict__[name]
        for key in [key for key, hook in module.__dict__[name].items() if _of_fsdp(hook)]:
            del hooks[key]
    return made


def _of_fsdp(hook: Any) -> bool:
    return type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp")
