"""What of a prepared model is kept in checkpoints: the house's pieces under logical names, JSON for the rest.

`model/NAME`, `buffer/NAME`, `optim/NAME/KEY`; a second prepared model has its number before the slash (`model1/NAME`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from unisono.library.gradients import LoopGradients
from unisono.library.sharding import Moved
from unisono.parallel.params import Slot, local_of
from unisono.spec.errors import UsageError
from unisono.train.state.checkpoint import Box
from unisono.train.state.checkpoint.manifest import read_manifest
from unisono.train.state.checkpoint.tensorfile import DTYPES

Plain = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Prepared:
    """One model with its optimisers as `prepare` left them on this rank. number: 0 for the first. moved: what became of
    parameters that sharding replaced. names: of each parameter, with aliases, to its id."""

    number: int
    model: nn.Module
    optimizers: list[Optimizer]
    slots: tuple[Slot, ...]
    gradients: LoopGradients
    moved: Moved
    names: dict[str, int]

    @property
    def plain(self) -> nn.Module:
        """The model under the names that its class gives."""
        return as_written(self.model)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Groups of parameters of all its optimisers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def state_of(self, slot: Slot) -> dict[str, Any]:
        """What its optimiser keeps of a parameter."""
        owner = next((o for o in self.optimizers if slot.live in o.state), None)
        return {} if owner is None else owner.state[slot.live]

    def owner_of(self, slot: Slot) -> Optimizer | None:
        """The optimiser that steps a parameter."""
        steps = (
            o for o in self.optimizers for g in o.param_groups if any(p is slot.live for p in g["params"])
        )
        return next(steps, None)

    def key(self, kind: str, name: str) -> str:
        return f"{kind}{self.number or ''}/{name}"


def as_written(model: nn.Module) -> nn.Module:
    """The module that `torch.compile` has wrapped; the model itself, if there is none."""
    return getattr(model, "_orig_mod", model)


def pieces_of(one: Prepared, first: bool, first_replica: bool) -> Iterator[Box]:
    """The tensors of a prepared model on this rank. first: rank 0, which saves what all have; first_replica: this
    rank's replica saves the shards."""
    for slot in one.slots:
        saved = first_replica if isinstance(slot.live, DTensor) else first
        yield Box(one.key("model", slot.name), slot.shape, slot.start, local_of(slot.live).detach(), saved)
        for key, value in tensors_of(one, slot).items():
            name = one.key("optim", f"{slot.name}/{key}")
            if tuple(value.shape) == slot.shape and isinstance(slot.live, DTensor):
                yield Box(name, slot.shape, slot.start, local_of(value), saved)
            else:
                yield _whole(name, value, first)
    for name, buffer in persistent_buffers(one.plain):
        yield _whole(one.key("buffer", name), buffer, first)


def _whole(name: str, value: Tensor, saved: bool) -> Box:
    return Box(name, tuple(value.shape), (0,) * value.dim(), value.detach(), saved)


def tensors_of(one: Prepared, slot: Slot) -> dict[str, Tensor]:
    """The optimiser's tensors for one parameter. Raises UsageError for state that has no place in a checkpoint."""
    found: dict[str, Tensor] = {}
    for key, value in one.state_of(slot).items():
        if isinstance(value, Tensor):
            strange = isinstance(value, DTensor) and tuple(value.shape) != slot.shape
        else:
            strange = not isinstance(value, Plain)
        if strange:
            raise UsageError(
                f"the optimiser keeps {key!r} of {slot.name} in a form that a checkpoint cannot hold",
                where=f"optimizer.state: {type(value).__name__}",
                fix="an optimiser whose state has the shape of its parameters, or save its state_dict() yourself",
                code="J06",
            )
        if isinstance(value, Tensor):
            found[key] = value
    return found


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a state_dict has, under the same names."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield (f"{path}.{name}" if path else name), buffer


def settings_of(one: Prepared) -> dict[str, Any]:
    """What of the optimiser is no tensor: its groups' settings, and plain values of its state."""
    numbers = {
        slot.name: {k: v for k, v in one.state_of(slot).items() if isinstance(v, Plain)} for slot in one.slots
    }
    return {
        "groups": [_plain_settings(group) for group in one.groups],
        "numbers": {name: values for name, values in numbers.items() if values},
    }


def _plain_settings(group: dict[str, Any]) -> dict[str, Any]:
    values = {
        k: v.item() if isinstance(v, Tensor) and v.dim() == 0 else v
        for k, v in group.items()
        if k != "params"
    }
    return {
        k: list(v) if isinstance(v, tuple) else v
        for k, v in values.items()
        if isinstance(v, Plain) or (isinstance(v, (list, tuple)) and all(isinstance(x, Plain) for x in v))
    }


def restore_settings(one: Prepared, settings: dict[str, Any], folder: Path) -> None:
    """The reverse of `settings_of`. Raises UsageError if the optimiser has other groups."""
    groups, kept = one.groups, settings["groups"]
    if len(groups) != len(kept):
        raise UsageError(
            f"the checkpoint's optimiser has {len(kept)} groups of parameters, this one {len(groups)}",
            where=str(folder),
            fix="make the optimiser as it was made when the checkpoint was saved",
            code="K03",
        )
    for group, values in zip(groups, kept, strict=True):
        for key, value in values.items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
    by_name = {slot.name: slot for slot in one.slots}
    for name, values in settings["numbers"].items():
        owner = one.owner_of(by_name[name]) if name in by_name else None
        if owner is not None:
            owner.state[by_name[name].live].update(values)


@torch.no_grad()
def make_room(one: Prepared, folder: Path) -> None:
    """Create the optimiser state that the checkpoint holds, for an optimiser that has not stepped yet."""
    known = read_manifest(folder).tensors
    by_name = {one.key("optim", slot.name): slot for slot in one.slots}
    for name, entry in known.items():
        owner, _, key = name.rpartition("/")
        slot = by_name.get(owner)
        optimizer = None if slot is None else one.owner_of(slot)
        if slot is None or optimizer is None or key in optimizer.state[slot.live]:
            continue
        dtype = DTYPES[entry.dtype]
        if entry.shape == slot.shape and entry.shape:
            room = torch.zeros_like(slot.live, dtype=dtype)
        else:
            room = torch.zeros(entry.shape, dtype=dtype, device=_device(optimizer, slot, entry.shape))
        optimizer.state[slot.live][key] = room


def _device(optimizer: Optimizer, slot: Slot, shape: Sequence[int]) -> torch.device:
    """Step counters live on the CPU unless the optimiser steps inside a kernel or a graph."""
    group = next(g for g in optimizer.param_groups if any(p is slot.live for p in g["params"]))
    near = shape or group.get("fused") or group.get("capturable")
    return local_of(slot.live).device if near else torch.device("cpu")
