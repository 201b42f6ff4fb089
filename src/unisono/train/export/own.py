"""A state_dict under the names of the user's own module, as one who wrote `FILE.py:FUNCTION` loads it without us.

A plain module is cut along its graph to be trained, so its tensors have other names in a checkpoint, and fused weights
another order of rows. Both are undone here. What no step changes, such as a mask, is as the constructor makes it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unisono.config import DataConfig, ModelConfig
from unisono.models.build import build as build_model
from unisono.models.build import user_model
from unisono.models.cut_chain import InferredChain, OwnName, unfolded
from unisono.models.folder import Outgoing, write_tensors
from unisono.models.hf.names import Shape
from unisono.models.plain import Unpacked, UserModel
from unisono.spec.errors import UsageError
from unisono.spec.layout import Anatomy
from unisono.spec.model import OwnModel
from unisono.train.build.build import facts_of
from unisono.train.data.load import load as load_data
from unisono.train.export.stored import StoredWeights


@dataclass(frozen=True, slots=True)
class OwnTensor:
    """A tensor of the user's state_dict. name: its name there. parameter: whether it is a parameter's first name. ours:
    the stored tensors that it is made of; none of one that is as the constructor makes it. make(read): from them, each
    as `read` gives it by our name."""

    name: str
    dtype: torch.dtype
    shape: Shape
    parameter: bool
    ours: tuple[str, ...]
    make: Callable[[Callable[[str], Tensor]], Tensor]


def write_own(
    out: Path, config: ModelConfig, data: DataConfig, weights: StoredWeights, state: Mapping[str, Any]
) -> dict[str, Any]:
    """`model.safetensors`, for `load_state_dict(strict=True)`. state: of the checkpoint.

    Returns files, tensors. Raises UsageError F01 where the module is not the one that was trained; OSError.
    """
    entries = [
        Outgoing(tensor.name, tensor.dtype, tensor.shape, partial(tensor.make, weights.__getitem__))
        for tensor in own_tensors(config, data, weights, state)
    ]
    return {"files": write_tensors(out, entries), "tensors": len(entries)}


def own_tensors(
    config: ModelConfig, data: DataConfig, weights: StoredWeights, state: Mapping[str, Any]
) -> list[OwnTensor]:
    """The state_dict of the user's module, in its order. Raises UsageError F01 where it is not what was trained."""
    module, names = _module_of(config, data, state)
    held = {cut.name: (name, cut.folded) for name, cut in names.items() if name in weights.stored}
    first = {id(p): name for name, p in module.named_parameters()}
    alias = {name: first[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}
    alias |= dict(getattr(module, "anatomy", Anatomy()).ties)
    tensors: list[OwnTensor] = []
    used: set[str] = set()
    for name, value in module.state_dict(keep_vars=True).items():
        ours, folds = held.get(alias.get(name, name), ("", ()))
        if ours:
            used.add(ours)
            if weights.shapes[ours] != tuple(value.shape):
                raise _another(f"{name} is {list(weights.shapes[ours])} there and {list(value.shape)} here")
            dtype = (weights.dtype or value.dtype) if value.is_floating_point() else value.dtype
            make = partial(_unfolded, name=ours, folds=folds)
        elif value.is_meta:
            raise _another(f"it has no {name}")
        else:
            dtype, make = value.dtype, partial(_constant, value.detach())
        is_first = isinstance(value, nn.Parameter) and alias.get(name, name) == name
        tensors.append(OwnTensor(name, dtype, tuple(value.shape), is_first, (ours,) if ours else (), make))
    if left := [name for name in weights.stored if name not in used]:
        raise _another(f"the module has no {left[0]}")
    return tensors


def _unfolded(read: Callable[[str], Tensor], name: str, folds: tuple[int, ...]) -> Tensor:
    return unfolded(read(name), *folds) if folds else read(name)


def _constant(value: Tensor, _: Callable[[str], Tensor]) -> Tensor:
    return value


def _module_of(
    config: ModelConfig, data: DataConfig, state: Mapping[str, Any]
) -> tuple[nn.Module, Mapping[str, OwnName]]:
    """(the module that is trained, as its author makes it; name in the checkpoint → where it comes from in it)."""
    if config.imports:
        what = "a model of transformers has the names of its folder"
        raise UsageError(what, code="F01", where="--to weights", fix="--to hf")
    facts = facts_of(load_data(data, config))
    if not isinstance(config, OwnModel):
        model = build_model(config, facts)
        return model, {name: OwnName(name) for name in model.state_dict()}
    seed = state["recipe"]["seed"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = user_model(config, config.sized(facts))
    if not isinstance(net, UserModel):
        return net, {name: OwnName(name) for name in net.state_dict()}
    module: nn.Module = net.stem.module  # type: ignore[assignment]
    said = {name: OwnName(cut, tuple(folds)) for name, (cut, folds) in state.get("cut_names", {}).items()}
    if not said:  # kept whole, or written by a version that did not say
        again = build_model(config, facts, seed=seed)
        said = again.cut_names if isinstance(again, InferredChain) else {}
        said = said or {f"stem.module.{name}": OwnName(name) for name in module.state_dict()}
    if not isinstance(module, Unpacked):
        return module, said
    inner = "module."
    return module.module, {
        name: cut._replace(name=cut.name.removeprefix(inner)) for name, cut in said.items()
    }


def _another(what: str) -> UsageError:
    """F01."""
    return UsageError(
        f"the module is not the one that was trained: {what}",
        code="F01",
        where="model.kind",
        likely="its file has changed since",
        fix="the file as it was when the run was made",
    )
