"""A user's module under FSDP2, in place, and its optimisers with it."""

import gc
from collections.abc import MutableMapping, Sequence
from types import FrameType, GeneratorType

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from unisono.comm.group import Group
from unisono.library.redraw import draw_whole
from unisono.library.state_dicts import take_whole, take_whole_state
from unisono.parallel.shard import Sharded
from unisono.spec.errors import UsageError

LEAST = (
    1 << 16
)  # parameters of a block that is gathered by itself: below, the messages cost more than the memory
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def blocks_of(model: nn.Module, least: int = LEAST) -> list[nn.Module]:
    """The modules to gather one at a time: elements of lists and sequences, as deep as they are large.

    A module that shares a parameter with the rest of the model stays with the rest.
    """
    found: list[nn.Module] = []
    _walk(model, least, found)
    inside = [set(map(id, block.parameters())) for block in found]
    uses: dict[int, int] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            uses[id(p)] = uses.get(id(p), 0) + 1
    return [
        block
        for block, own in zip(found, inside, strict=True)
        if all(_uses_within(block, p) == uses[p] for p in own)
    ]


def _walk(module: nn.Module, least: int, found: list[nn.Module]) -> None:
    for child in module.children():
        large = isinstance(module, _CONTAINERS) and _size(child) >= least
        deeper = isinstance(child, (nn.ModuleList, nn.ModuleDict)) or (
            isinstance(child, _CONTAINERS) and any(_size(inner) >= least for inner in child.children())
        )
        if large and not deeper:
            found.append(child)
        else:
            _walk(child, least, found)


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _uses_within(block: nn.Module, p: int) -> int:
    return sum(id(own) == p for module in block.modules() for own in module.parameters(recurse=False))


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
        after[
            name
        ]._backward_hooks = old._backward_hooks  # the same dicts, so that their handles take them away
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
    """What still holds a parameter that is no longer the model's, such as a list of an EMA or another optimiser: the
    type of the holder, or "". A variable may be left of a loop; if it is used, `following` sees it."""
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
    return any(isinstance(one, (FrameType, GeneratorType)) for one in gc.get_referrers(names))


def keep_shards(model: nn.Module) -> None:
    """Have `model.parameters()` be the shards after an evaluation, and `model.zero_grad()` act on them at any time:
    from a forward to its backward, FSDP2 leaves whole parameters in their place."""
    shards = list(model.parameters())

    def evaluated(own: nn.Module, _: object, __: object) -> None:
        for module in own.modules() if not torch.is_grad_enabled() else ():
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
            for one in group.fsdp_params if group is not None else ():
                whole = getattr(one, "_unsharded_param", None)
                if whole is not None:
                    whole.requires_grad_(one.sharded_param.requires_grad)
