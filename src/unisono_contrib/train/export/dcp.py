"""`export --to dcp`: weights, optimiser state, settings and step as a loop with FSDP2 loads them on any world.

The folder is what `torch.distributed.checkpoint` writes of `{"model": ..., "optim": ..., "step": N}`, the first two as
its `get_state_dict` gives them. Settings stand under the numbers of groups and under the names of parameters, for both
forms of that function. Tensors are read and written one by one.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from unisono.config import DataConfig, TrainConfig
from unisono.models.folder import Outgoing
from unisono.models.hf import HFConfig
from unisono.models.hf.names import Names
from unisono.models.weights import shapes_there, sources_of, theirs_of
from unisono.spec.errors import UsageError
from unisono.spec.model import Facts, restored
from unisono.train.export.own import OwnTensor, own_tensors
from unisono.train.export.stored import StoredWeights
from unisono.train.state.checkpoint import load, read_full
from unisono.train.state.checkpoint.manifest import TensorEntry
from unisono.train.state.checkpoint.read import parameters_of
from unisono.train.state.checkpoint.tensorfile import DTYPES

_OPTIM = "optim/"


def write_dcp(folder: Path, out: Path) -> dict[str, Any]:
    """folder: a checkpoint of a run or of a job. Returns files, tensors. Raises UsageError F01, K01; OSError."""
    state = load(folder, [])
    content = _of_run(folder, state) if "recipe" in state else _of_job(folder, state)
    entries = content.entries()
    settings = {
        f"optim.param_groups.{of}.{key}": value
        for of, group in content.groups.items()
        for key, value in group.items()
    }
    whole = {entry.name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for entry in entries}
    planner = _Lazily({entry.name: entry.make for entry in entries})
    dcp.save(
        {**whole, **settings, "step": int(state["step"])}, checkpoint_id=out, planner=planner, no_dist=True
    )
    return {"files": sorted(path.name for path in out.iterdir()), "tensors": len(entries)}


class _Lazily(DefaultSavePlanner):
    """Gives each tensor when its turn comes. make: by name."""

    def __init__(self, make: Mapping[str, Callable[[], Tensor]]) -> None:
        super().__init__()
        self._make = make

    def lookup_object(self, index: MetadataIndex) -> Any:
        make = self._make.get(index.fqn)
        return super().lookup_object(index) if make is None else make()


@dataclass(frozen=True, slots=True)
class _Content:
    """weights: under the names of the module. moments: by key, like them. groups: settings, by a group's number or a
    parameter's name."""

    weights: Sequence[Outgoing]
    moments: Mapping[str, Sequence[Outgoing]]
    groups: Mapping[str, Mapping[str, Any]]

    def entries(self) -> list[Outgoing]:
        """All tensors by their flat names."""
        kept = [
            replace(entry, name=f"optim.state.{entry.name}.{key}")
            for key, entries in self.moments.items()
            for entry in entries
        ]
        return [*(replace(entry, name=f"model.{entry.name}") for entry in self.weights), *kept]


def _moments_of(folder: Path) -> dict[str, dict[str, TensorEntry]]:
    """What the optimiser keeps: key → parameter's name in the checkpoint → what is stored."""
    moments: dict[str, dict[str, TensorEntry]] = {}
    for full, entry in parameters_of(folder, _OPTIM).items():
        name, _, key = full.rpartition("/")
        moments.setdefault(key, {})[name] = entry
    return moments


def _outgoing(name: str, entry: TensorEntry, folder: Path, full: str) -> Outgoing:
    return Outgoing(name, DTYPES[entry.dtype], tuple(entry.shape), lambda: read_full(folder, [full])[full])


# A job's --------------------------------------------------------------------------------------------------------------


def _of_job(folder: Path, state: Mapping[str, Any]) -> _Content:
    """Names are those of the module already; a weight under two names is stored once."""
    settings = state["optim"][0]
    held = parameters_of(folder)
    weights = [_outgoing(name, entry, folder, f"model/{name}") for name, entry in held.items()]
    weights += [
        _outgoing(alias, held[name], folder, f"model/{name}") for alias, name in settings["aliases"].items()
    ]
    weights += [
        _outgoing(name, entry, folder, f"buffer/{name}")
        for name, entry in parameters_of(folder, "buffer/").items()
    ]
    moments = {
        key: [_outgoing(name, entry, folder, f"{_OPTIM}{name}/{key}") for name, entry in of.items()]
        for key, of in _moments_of(folder).items()
    }
    return _Content(weights, moments, _named(zip(settings["groups"], settings["params"], strict=True)))


# A run's --------------------------------------------------------------------------------------------------------------


def _of_run(folder: Path, state: Mapping[str, Any]) -> _Content:
    recipe, weights, moments = state["recipe"], StoredWeights(folder), _moments_of(folder)
    if weights.adapters:
        raise UsageError(
            "a run with adapters has no optimiser state of the module's own weights",
            code="F01",
            where="--to dcp",
            fix="--to adapter, or --to hf",
        )
    model, data = restored(recipe["model"]), DataConfig.model_validate_json(json.dumps(recipe["data"]))
    train = TrainConfig.model_validate_json(json.dumps(recipe["train"]))
    foreign = isinstance(model, HFConfig)
    tensors = _of_library(model, weights) if foreign else own_tensors(model, data, weights, state)
    whole = [Outgoing(t.name, t.dtype, t.shape, partial(t.make, weights.__getitem__)) for t in tensors]
    learning = [t for t in tensors if t.parameter and any(t.ours[0] in of for of in moments.values())]
    kept = {
        key: [_moment(t, key, of, folder) for t in learning if t.ours[0] in of] for key, of in moments.items()
    }
    return _Content(whole, kept, _named(_groups(train, learning, int(state["step"]))))


def _of_library(config: HFConfig, weights: StoredWeights) -> list[OwnTensor]:
    """Under the names of the library's module."""
    names: Names = config.build(Facts()).names  # type: ignore[assignment]
    there, dtype = shapes_there(names.modules), weights.dtype or torch.float32
    tensors = [
        OwnTensor(theirs, dtype, there[theirs], True, tuple(ours for ours, _ in made_of),
                  partial(theirs_of, made_of, there[theirs]))
        for theirs, made_of in sources_of(names.modules).items()
    ]  # fmt: skip
    by_name = {tensor.name: tensor for tensor in tensors}
    aliases = [
        replace(by_name[owner], name=alias, parameter=False) for alias, owner in names.their_ties.items()
    ]
    return [*tensors, *aliases]


def _moment(tensor: OwnTensor, key: str, stored: Mapping[str, TensorEntry], folder: Path) -> Outgoing:
    def read(name: str) -> Tensor:
        full = f"{_OPTIM}{name}/{key}"
        return read_full(folder, [full])[full]

    entry = stored[tensor.ours[0]]
    if entry.shape:
        return Outgoing(tensor.name, DTYPES[entry.dtype], tensor.shape, partial(tensor.make, read))
    return Outgoing(tensor.name, DTYPES[entry.dtype], (), partial(read, tensor.ours[0]))


def _groups(
    train: TrainConfig, learning: Sequence[OwnTensor], step: int
) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Settings and names of each group, as the recipe's optimiser has them: matrices decay, the rest does not."""
    chosen = train.optimiser()
    members = {tensor.name: chosen.for_parameter(tensor.name, tensor.shape) for tensor in learning}
    for member in dict.fromkeys(members.values()):
        for matrix in (True, False):
            mine = [t for t in learning if members[t.name] == member and (len(t.shape) >= 2) == matrix]
            if mine:
                params = [nn.Parameter(torch.empty(t.shape, device="meta")) for t in mine]
                decay = train.weight_decay if matrix else 0.0
                bound = member.bind([{"params": params, "weight_decay": decay}], train.peak_lr, False)
                settings = {k: v for k, v in bound.param_groups[0].items() if k != "params"}
                rate = train.rate()(max(0, step - 1))
                yield {**settings, "lr": rate, "initial_lr": train.peak_lr}, [t.name for t in mine]


def _named(groups: Iterable[tuple[Mapping[str, Any], Sequence[str]]]) -> dict[str, dict[str, Any]]:
    """Settings under the numbers of groups, and under the names of parameters."""
    named: dict[str, dict[str, Any]] = {}
    for number, (settings, params) in enumerate(groups):
        named[str(number)] = {**settings, "params": list(params)}
        named |= {name: dict(settings) for name in params}
    return named
