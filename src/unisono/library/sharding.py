"""A user's module under FSDP2, in place, and its optimisers with it; loading, copying and drawing anew know shards.

`state_dict`s of other libraries are those of one device: all ranks call `whole_model` and `whole_optimizer`, which give
each of them whole tensors; `load_state_dict` of what is sharded here takes whole tensors.
"""

import copy
import gc
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from types import FrameType, GeneratorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from unisono.comm.group import Group
from unisono.parallel.params import local_of
from unisono.parallel.shard import Sharded
from unisono.spec.errors import UsageError


@torch.no_grad()
def whole_model(model: nn.Module) -> dict[str, Any]:
    """model.state_dict() with whole tensors. A weight under two names stays one tensor."""
    owner = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    known: dict[Any, Tensor] = {}
    whole: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        if isinstance(value, DTensor):
            key = owner.get(name, name)
            if key not in known:
                known[key] = value.full_tensor()
            value = known[key]
        whole[name] = value
    return whole


@torch.no_grad()
def whole_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """optimizer.state_dict() with whole tensors, on every rank."""
    whole = optimizer.state_dict()
    state = {
        number: {key: x.full_tensor() if isinstance(x, DTensor) else x for key, x in entries.items()}
        for number, entries in whole["state"].items()
    }
    return {**whole, "state": state}


def take_whole(model: nn.Module) -> None:
    """Have `load_state_dict` of a sharded model take whole tensors too."""

    def dealt(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, p in module.named_parameters(remove_duplicate=False):
            key = prefix + name
            if key in state:
                state[key] = _like(state[key], p)

    model.register_load_state_dict_pre_hook(dealt)


def take_whole_state(optimizer: Optimizer) -> None:
    """Have `load_state_dict` of an optimiser that steps shards take whole tensors too."""
    optimizer.register_load_state_dict_pre_hook(_dealt_state)


def _dealt_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    numbers = [n for group in state["param_groups"] for n in group["params"]]
    live = [p for group in optimizer.param_groups for p in group["params"]]
    owner = dict(zip(numbers, live, strict=False))
    dealt = {
        n: {key: _like(x, owner.get(n)) for key, x in entries.items()}
        if isinstance(entries, Mapping)
        else entries
        for n, entries in state["state"].items()
    }
    return {**state, "state": dealt}


@torch.no_grad()
def _like(x: Any, p: Any) -> Any:
    """x as p is: this rank's shard of it, if p is a shard and x has p's shape."""
    if not isinstance(p, DTensor) or not isinstance(x, Tensor) or isinstance(x, DTensor):
        return x
    if tuple(x.shape) != tuple(p.shape):
        return x
    device = p.to_local().device
    return distribute_tensor(x.detach().to(device), p.device_mesh, p.placements, src_data_rank=None)


# Parameters of a block that is gathered by itself: below, the messages cost more than the memory.
LEAST = 1 << 16
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def blocks_of(model: nn.Module, least: int = LEAST) -> list[nn.Module]:
    """The modules to gather one at a time: elements of lists and sequences, as deep as they are large.

    A module that shares a parameter with the rest of the model stays with the rest.
    """
    blocks: list[nn.Module] = []
    _walk(model, least, blocks)
    uses = _uses(model)
    return [block for block in blocks if all(uses[p] == count for p, count in _uses(block).items())]


def _walk(module: nn.Module, least: int, blocks: list[nn.Module]) -> None:
    for child in module.children():
        large = isinstance(module, _CONTAINERS) and _size(child) >= least
        deeper = isinstance(child, (nn.ModuleList, nn.ModuleDict)) or (
            isinstance(child, _CONTAINERS) and any(_size(inner) >= least for inner in child.children())
        )
        if large and not deeper:
            blocks.append(child)
        else:
            _walk(child, least, blocks)


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _uses(module: nn.Module) -> Counter[int]:
    """Return how many modules in this one have each parameter, by its id."""
    return Counter(id(p) for inner in module.modules() for p in inner.parameters(recurse=False))


Moved = MutableMapping[Tensor, nn.Parameter]  # from a model's parameters to the shards that replaced them


def shard(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    blocks: Sequence[nn.Module] | None,
    group: Group,
    zero: int,
) -> Moved:
    """Shard the parameters in place, and point the optimisers, the same objects, at the shards. Returns what became of
    each parameter, as long as somebody holds the old one.

    Raises UsageError for what FSDP2 cannot shard.
    """
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        raise UsageError(
            "LBFGS makes one vector of all parameters, which shards do not add up to",
            where="plan.shard",
            fix="dp instead of shard, or another optimiser",
            code="J05",
        )
    scalars = [name for name, p in model.named_parameters() if p.dim() == 0]
    if scalars:
        raise UsageError(
            f"{scalars[0]} has no dim that could be sharded",
            where="plan.shard",
            fix="give it the shape (1,), or dp instead of shard",
            code="J05",
        )
    kinds = {p.dtype for p in model.parameters() if p.requires_grad}
    if len(kinds) > 1:
        raise UsageError(
            f"the model's parameters have several dtypes: {', '.join(sorted(map(str, kinds)))}",
            where="plan.shard",
            fix="one dtype for all, or dp instead of shard",
            code="J05",
        )
    _refuse_overlaps(model)
    for p in model.parameters():
        p.data = p.data.contiguous()  # the numbers stay; FSDP2 takes no other layout
    before = dict(model.named_parameters())
    draw_whole()
    Sharded(model, blocks_of(model) if blocks is None else blocks, group, zero)
    after = dict(model.named_parameters())
    moved = WeakTensorKeyDictionary()
    for name, old in before.items():
        moved[old] = after[name]
        # The same dicts, so that their handles take them away.
        after[name]._backward_hooks = old._backward_hooks
        after[name]._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    for optimizer in optimizers:
        repoint(optimizer, moved)
    keep_shards(model)
    take_whole(model)
    return moved


def _refuse_overlaps(model: nn.Module) -> None:
    """Raises UsageError J05 for two parameters in the same memory, which shards would not be."""
    seen: dict[int, str] = {}
    for name, p in model.named_parameters():
        at = p.untyped_storage().data_ptr()
        if p.numel() and seen.setdefault(at, name) != name:
            raise UsageError(
                f"{seen[at]} and {name} lie in the same memory, and are two parameters",
                where="plan.shard",
                fix="one nn.Parameter in both places, a clone of its own for each, or dp instead of shard",
                code="J05",
            )


def refuse_others(model: nn.Module) -> None:
    """Raises UsageError J29 if a forward begins with tensors in the places of the shards."""
    if not isinstance(next(model.parameters(), None), nn.Parameter):
        raise UsageError(
            "the model is called with other weights than its own, as torch.func.functional_call does",
            where="plan.shard",
            likely="torch.func.grad, or weights of an inner step",
            fix="dp in the place of shard",
            code="J29",
        )


@torch.no_grad()
def repoint(optimizer: Optimizer, moved: Moved) -> None:
    """Parameters and state of the optimiser, replaced in place: whoever holds it or its groups sees the new ones."""
    for group in optimizer.param_groups:
        group["params"][:] = [moved.get(p, p) for p in group["params"]]
    for old in [p for p in optimizer.state if p in moved]:
        new, state = moved[old], optimizer.state.pop(old)
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == old.shape and isinstance(new, DTensor):
                state[key] = distribute_tensor(value, new.device_mesh, new.placements)
        optimizer.state[new] = state
    take_whole_state(optimizer)


def held_elsewhere(moved: Moved) -> str:
    """Name the type of a container, such as an EMA's list, that holds a parameter which sharding has replaced; "" if
    there is none. A variable may be left of a loop; if it is used, `batch_tracer` sees it."""
    gc.collect()  # FSDP2 leaves cycles
    alive = list(moved)
    for old in alive:
        for holder in gc.get_referrers(old):
            contains = isinstance(holder, (list, tuple, set, dict)) and holder is not alive
            if contains and not (isinstance(holder, dict) and _are_variables(holder)):
                return f"a {type(holder).__name__} of parameters"
    return ""


def _are_variables(names: dict[object, object]) -> bool:
    """Whether a dict is the variables of a script, or of a function that is running."""
    if "__builtins__" in names or any(isinstance(value, type(gc)) for value in names.values()):
        return True
    return any(isinstance(holder, (FrameType, GeneratorType)) for holder in gc.get_referrers(names))


def keep_shards(model: nn.Module) -> None:
    """Have `model.parameters()` be the shards after an evaluation, and `model.zero_grad()` act on them at any time:
    from a forward to its backward, FSDP2 leaves whole parameters in their place."""
    shards = list(model.parameters())

    def evaluated(root: nn.Module, _: object, __: object) -> None:
        for module in root.modules() if not torch.is_grad_enabled() else ():
            if isinstance(module, FSDPModule):
                module.reshard()

    def zero_grad(set_to_none: bool = True) -> None:
        for p in shards:
            if p.grad is not None:
                p.grad = None if set_to_none else torch.zeros_like(p.grad)

    model.register_forward_hook(evaluated)
    model.__dict__["zero_grad"] = zero_grad


def follow_flags(model: nn.Module) -> None:
    """Have FSDP2 follow parameters that were frozen or thawed: it asks them only once."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            for parameter in group.fsdp_params if group is not None else ():
                whole = getattr(parameter, "_unsharded_param", None)
                if whole is not None:
                    whole.requires_grad_(parameter.sharded_param.requires_grad)


_aten = torch.ops.aten
_DRAWS = (_aten.normal_.default, _aten.uniform_.default, _aten.bernoulli_.float, _aten.exponential_.default)


def draw_whole() -> None:
    """Have random operations on shards draw whole tensors from now on, so that they have the numbers of one device."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    for operation in _DRAWS:
        handlers[operation] = _drawn


def _drawn(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    x, *how = args
    local = x.to_local()
    whole = operation(local.new_empty(x.shape), *how, **kwargs)
    local.copy_(distribute_tensor(whole, x.device_mesh, x.placements, src_data_rank=None).to_local())
    return x


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
        copied_model = _plain(model, memo)
        for module in copied_model.modules():
            for key, hook in list(module._load_state_dict_post_hooks.items()):
                if "FSDP" in getattr(hook, "__qualname__", ""):
                    del module._load_state_dict_post_hooks[key]
        shard(copied_model, [memo[id(block)] for block in blocks])
        with torch.no_grad():
            for new, old in zip(copied_model.parameters(), model.parameters(), strict=True):
                local_of(new).copy_(local_of(old))
        copied_with_shards(copied_model, shard)
        return copied_model

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.__dict__["__deepcopy__"] = copied if module is model else partial(_plain, module)


def _plain(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy a module without FSDP2. memo: has its parameters already."""
    kind = next(base for base in type(module).__mro__[1:] if not issubclass(base, FSDPModule))
    copied_module = nn.Module.__new__(kind)
    memo[id(module)] = copied_module
    for name, value in module.__dict__.items():
        # FSDP2's own notes on a module, and our __deepcopy__.
        if name.startswith(("__", "_is_fsdp", "_fsdp")):
            continue
        copied_module.__dict__[name] = copy.copy(value) if name in _HOOKS else copy.deepcopy(value, memo)
    for name in _HOOKS:
        hooks = copied_module.__dict__[name]
        for key in [key for key, hook in module.__dict__[name].items() if _of_fsdp(hook)]:
            del hooks[key]
    return copied_module


def _of_fsdp(hook: Any) -> bool:
    return type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp")
