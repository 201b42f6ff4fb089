"""A user's module under FSDP2, in place, and its optimiser with it."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from unisono.comm.group import Group
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


def shard(
    model: nn.Module, optimizer: Optimizer, blocks: Sequence[nn.Module] | None, group: Group, zero: int
) -> None:
    """Shard the parameters in place and point the optimiser, the same object, at the shards.

    Raises UsageError for what FSDP2 cannot shard.
    """
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
    before = dict(model.named_parameters())
    Sharded(model, blocks_of(model) if blocks is None else blocks, group, zero)
    after = dict(model.named_parameters())
    repoint(optimizer, {id(before[name]): after[name] for name in before}, before)


@torch.no_grad()
def repoint(
    optimizer: Optimizer, now: Mapping[int, nn.Parameter], before: Mapping[str, nn.Parameter]
) -> None:
    """Parameters and state of the optimiser, replaced in place: whoever holds it or its groups sees the new ones."""
    for group in optimizer.param_groups:
        group["params"][:] = [now[id(p)] for p in group["params"]]
    for old in before.values():
        if old not in optimizer.state:
            continue
        new, state = now[id(old)], optimizer.state.pop(old)
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == old.shape and isinstance(new, DTensor):
                state[key] = distribute_tensor(value, new.device_mesh, new.placements)
        optimizer.state[new] = state
