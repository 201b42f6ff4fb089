"""A job's state as FSDP2 and `torch.distributed.checkpoint` name and place it, both ways.

`{"model": ..., "optim": ..., "step": N}`, the first two as torch's `get_state_dict` gives them. In memory tensors may
be plain or DTensors on any mesh. On disk it is a folder of DCP, which `JobPlace.load` reads.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from unisono.library.explain import explained
from unisono.library.state import (
    Kept,
    Prepared,
    SavedJob,
    make_room,
    persistent_buffers,
    pieces_of,
    restore_settings,
)
from unisono.models.weights import Weights, matched, own_names
from unisono.spec.errors import UsageError
from unisono.train.foreign.trained import TrainedSource, TrainedState, by_parameter, lacks
from unisono.train.state.checkpoint import Box

_HOW = ("params", "foreach", "fused", "capturable", "differentiable")
"""Of an optimiser's group: what does not say which update is made."""


@explained()
@torch.no_grad()
def to_dtensor_state_dict(job: SavedJob, mesh: DeviceMesh | None = None) -> dict[str, Any]:
    """Return `{"model": ..., "optim": ..., "step": N}` of the job's model, as torch's `get_state_dict` names it. Every
    rank calls it.

    Parameters and what the optimiser keeps like them are DTensors where `shard` cuts them, else whole tensors; they are
    the job's own, not copies. mesh: a mesh of one dim; then all of them are DTensors on it, `Shard(0)`, as
    `fully_shard(model, mesh=mesh)` places them, and copies. `dcp.save` writes either.

    Raises UsageError K08 where several models are prepared.
    """
    prepared = _only(job)
    placed = (lambda x: x) if mesh is None else lambda x: _on(mesh, x)
    by_id = {id(slot.live): slot for slot in prepared.slots}
    weights = {slot.name: placed(slot.live.detach()) for slot in prepared.slots}
    model = {name: weights[by_id[key].name] for name, key in prepared.names.items() if key in by_id}
    model |= dict(persistent_buffers(prepared.plain))
    state = {
        slot.name: {
            key: placed(x) if isinstance(x, Tensor) and tuple(x.shape) == slot.shape and x.dim() else x
            for key, x in prepared.state_of(slot).items()
        }
        for slot in prepared.slots
        if prepared.state_of(slot)
    }
    groups = [
        {**group, "params": [by_id[id(p)].name for p in group["params"] if id(p) in by_id]}
        for group in prepared.groups
    ]
    return {"model": model, "optim": {"state": state, "param_groups": groups}, "step": job.step}


def _on(mesh: DeviceMesh, x: Tensor) -> DTensor:
    whole = x.full_tensor() if isinstance(x, DTensor) else x
    return distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)


@explained()
@torch.no_grad()
def from_dtensor_state_dict(job: SavedJob, state: Mapping[str, Any]) -> None:
    """Fill the job's model, optimiser and step from `{"model": ..., "optim": ..., "step": N}`; the reverse of
    `to_dtensor_state_dict`. Every rank calls it, after `job.prepare`.

    Tensors may be whole, or DTensors on any mesh; `optim` as `get_state_dict` gives it, flattened or not. Without
    `step` it is that of the optimiser's own counters. One tensor at a time is whole on a rank.

    Raises UsageError: K07 where something lacks, K08 where groups of parameters differ.
    """
    flat = {**{("model", name): x for name, x in state["model"].items()}, **_moments(state["optim"])}

    def read(box: Box) -> None:
        kind, _, name = box.name.partition("/")
        parts = ("model", name) if kind != "optim" else ("optim", *name.rpartition("/")[::2])
        if parts not in flat or tuple(flat[parts].shape) != tuple(box.full_shape):
            raise lacks("unisono.from_dtensor_state_dict", f"it has no {' '.join(parts[1:])} of this shape")
        x = flat[parts]
        whole = x.full_tensor() if isinstance(x, DTensor) else x
        ends = zip(box.start, box.tensor.shape, strict=True)
        box.tensor.copy_(whole[tuple(slice(start, start + size) for start, size in ends)])

    kept = {
        f"optim/{parts[1]}/{parts[2]}": (tuple(x.shape), x.dtype)
        for parts, x in flat.items()
        if parts[0] == "optim"
    }
    counters = [int(x) for parts, x in flat.items() if parts[0] == "optim" and parts[2] == "step"]
    step = int(state.get("step", max(counters, default=0)))
    _fill(job, _settings(state["optim"]), kept, read, step, "unisono.from_dtensor_state_dict")


def _moments(optim: Mapping[str, Any]) -> dict[tuple[str, ...], Tensor]:
    """What an optimiser keeps, by ("optim", parameter, key), from either form of `get_state_dict`."""
    if "state" in optim:
        entries = {(name, key): x for name, state in optim["state"].items() for key, x in state.items()}
    else:
        flat = {name.removeprefix("state."): x for name, x in optim.items() if name.startswith("state.")}
        entries = {(name.rpartition(".")[0], name.rpartition(".")[2]): x for name, x in flat.items()}
    return {("optim", *place): x for place, x in entries.items() if isinstance(x, Tensor)}


def _settings(optim: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    if "param_groups" in optim:
        return by_parameter({str(number): group for number, group in enumerate(optim["param_groups"])})
    groups: dict[str, dict[str, Any]] = {}
    for name, value in optim.items():
        if name.startswith("param_groups."):
            of, _, key = name.removeprefix("param_groups.").rpartition(".")
            groups.setdefault(of, {})[key] = value
    return by_parameter(groups)


def go_on(job: SavedJob, state: TrainedState) -> dict[str, Any]:
    """Fill the job's model, optimiser and step from what another program saved; returns {}: what `job.save` was given
    is not there. Every rank calls it.

    Raises UsageError: W02 to W04 where it is of another model, K07 where it lacks something, K08 where groups
    of parameters differ."""
    prepared = _only(job)
    shapes = {slot.name: slot.shape for slot in prepared.slots}
    buffers = dict(persistent_buffers(prepared.plain))
    layout = matched([own_names(shapes)], state.weights, [*prepared.names, *buffers])
    first = next(iter(shapes))
    prefix = layout[first][0].name.removesuffix(first)
    source = TrainedSource(state, layout, {name: prefix + name for name in buffers})
    kept = {
        f"optim/{name}/{key}": (moments.shapes[prefix + name], _dtype(moments, prefix + name))
        for key, moments in state.moments.items()
        for name in shapes
        if prefix + name in moments.shapes
    }
    settings = {name.removeprefix(prefix): of for name, of in state.settings.items()}

    def read(box: Box) -> None:
        source.load([replace(box, name=box.name.replace("buffer/", "model/", 1))])

    _fill(job, settings, kept, read, state.step, state.weights.where)
    job.mesh.data.barrier()  # nobody may write over what another rank still reads
    return {}


def _dtype(weights: Weights, name: str) -> torch.dtype:
    """Of one of them, by an element of it."""
    dims = len(weights.shapes[name])
    return weights.box(name, (0,) * dims, tuple(min(n, 1) for n in weights.shapes[name])).dtype


def _fill(
    job: SavedJob,
    settings: Mapping[str, Mapping[str, Any]],
    kept: Kept,
    read: Callable[[Box], None],
    step: int,
    where: str,
) -> None:
    """settings: by parameters' names. kept: what the optimiser keeps there. read: fills a box."""
    prepared = _only(job)
    groups = list(_groups(prepared, settings, where))
    make_room(prepared, kept)
    for box in pieces_of(prepared, first=True, first_replica=True):
        read(box)
    restore_settings(prepared, {"groups": groups, "numbers": {}}, where)
    job.step = step


def _groups(
    prepared: Prepared, settings: Mapping[str, Mapping[str, Any]], where: str
) -> Iterator[dict[str, Any]]:
    """Settings of each live group."""
    by_id = {id(slot.live): slot.name for slot in prepared.slots}
    for group in prepared.groups:
        names = [by_id[id(p)] for p in group["params"] if by_id.get(id(p)) in settings]
        said = [{k: v for k, v in settings[n].items() if k in group and k not in _HOW} for n in names]
        other = next((n for n, of in zip(names, said, strict=True) if of != said[0]), None)
        if other is not None:
            key = next(k for k in said[0] if settings[other].get(k) != said[0][k])
            raise UsageError(
                f"{names[0]} and {other} are in one group of the optimiser here, and have another {key} each there:"
                f" {settings[names[0]][key]} and {settings[other].get(key)}",
                where=where,
                fix="make the optimiser with the groups that it had when the state was saved",
                code="K08",
            )
        yield dict(said[0]) if said else {}


def _only(job: SavedJob) -> Prepared:
    if len(job._prepared) == 1:
        return job._prepared[0]
    raise UsageError(
        f"{len(job._prepared)} models are prepared, and such a state is of one",
        where="a state of torch.distributed.checkpoint",
        fix="job.prepare one model first; job.save and job.load keep several",
        code="K08",
    )
