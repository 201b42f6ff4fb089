"""Checkpoints of a job: models, optimisers, random states, what else the script keeps, and the place in the data.

Tensors are the boxes of logical tensors that `unisono train` saves: `model/NAME`, `buffer/NAME`, `optim/NAME/KEY`; a
second prepared model has its number before the slash (`model1/NAME`). The rest is JSON.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from unisono.comm.mesh import Mesh
from unisono.library.batch_sharding import ShardedLoader
from unisono.library.exchange import decoded, encoded
from unisono.library.gradients import LoopGradients
from unisono.library.join import JoinedLoaders
from unisono.library.randomness import Streams, all_states, seed_of, set_all_states
from unisono.library.sharding import Moved
from unisono.parallel.params import Slot, local_of
from unisono.plan import Plan
from unisono.spec.errors import UsageError
from unisono.train.state.checkpoint import Box, Saver, latest, load, read_full, tensor_names
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
        """Return the state that its optimiser keeps of a parameter."""
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


def pieces_of(prepared: Prepared, first: bool, first_replica: bool) -> Iterator[Box]:
    """The tensors of a prepared model on this rank. first: rank 0, which saves what all have; first_replica: this
    rank's replica saves the shards."""
    for slot in prepared.slots:
        saved = first_replica if isinstance(slot.live, DTensor) else first
        yield Box(
            prepared.key("model", slot.name), slot.shape, slot.start, local_of(slot.live).detach(), saved
        )
        for key, value in tensors_of(prepared, slot).items():
            name = prepared.key("optim", f"{slot.name}/{key}")
            if tuple(value.shape) == slot.shape and isinstance(slot.live, DTensor):
                yield Box(name, slot.shape, slot.start, local_of(value), saved)
            else:
                yield _whole(name, value, first)
    for name, buffer in persistent_buffers(prepared.plain):
        yield _whole(prepared.key("buffer", name), buffer, first)


def _whole(name: str, value: Tensor, saved: bool) -> Box:
    return Box(name, tuple(value.shape), (0,) * value.dim(), value.detach(), saved)


def tensors_of(prepared: Prepared, slot: Slot) -> dict[str, Tensor]:
    """The optimiser's tensors for one parameter. Raises UsageError for state that has no place in a checkpoint."""
    tensors: dict[str, Tensor] = {}
    for key, value in prepared.state_of(slot).items():
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
            tensors[key] = value
    return tensors


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a state_dict has, under the same names."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield (f"{path}.{name}" if path else name), buffer


def settings_of(prepared: Prepared) -> dict[str, Any]:
    """Return the settings of the optimiser's groups and the plain values of its state, which are no tensors."""
    numbers = {
        slot.name: {k: v for k, v in prepared.state_of(slot).items() if isinstance(v, Plain)}
        for slot in prepared.slots
    }
    by_id = {id(slot.live): slot.name for slot in prepared.slots}
    return {
        "groups": [_plain_settings(group) for group in prepared.groups],
        "params": [[by_id[id(p)] for p in group["params"] if id(p) in by_id] for group in prepared.groups],
        "aliases": {n: by_id[key] for n, key in prepared.names.items() if by_id.get(key, n) != n},
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


def restore_settings(prepared: Prepared, settings: dict[str, Any], folder: str | Path) -> None:
    """The reverse of `settings_of`. Raises UsageError if the optimiser has other groups."""
    groups, kept = prepared.groups, settings["groups"]
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
    by_name = {slot.name: slot for slot in prepared.slots}
    for name, values in settings["numbers"].items():
        owner = prepared.owner_of(by_name[name]) if name in by_name else None
        if owner is not None:
            owner.state[by_name[name].live].update(values)


Kept = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Names of an optimiser's tensors, as checkpoints spell them → shape and dtype."""


def kept_in(folder: Path) -> Kept:
    """All tensors of a checkpoint."""
    return {name: (entry.shape, DTYPES[entry.dtype]) for name, entry in read_manifest(folder).tensors.items()}


@torch.no_grad()
def make_room(prepared: Prepared, known: Kept) -> None:
    """Create the optimiser state that a checkpoint holds, for an optimiser that has not stepped yet."""
    by_name = {prepared.key("optim", slot.name): slot for slot in prepared.slots}
    for name, (shape, dtype) in known.items():
        owner, _, key = name.rpartition("/")
        slot = by_name.get(owner)
        optimizer = None if slot is None else prepared.owner_of(slot)
        if slot is None or optimizer is None or key in optimizer.state[slot.live]:
            continue
        if shape == slot.shape and shape:
            room = torch.zeros_like(slot.live, dtype=dtype)
        else:
            room = torch.zeros(shape, dtype=dtype, device=_device(optimizer, slot, shape))
        optimizer.state[slot.live][key] = room


def _device(optimizer: Optimizer, slot: Slot, shape: Sequence[int]) -> torch.device:
    """Step counters live on the CPU unless the optimiser steps inside a kernel or a graph."""
    group = next(g for g in optimizer.param_groups if any(p is slot.live for p in g["params"]))
    near = shape or group.get("fused") or group.get("capturable")
    return local_of(slot.live).device if near else torch.device("cpu")


KEPT = "kept/"  # before the names of what a script keeps besides
JOINED = "joined/rank"  # before a rank's number, its place in data of its own


class SavedJob(Protocol):
    """The parts of a job that are saved."""

    step: int
    plan: Plan
    mesh: Mesh
    rank: int
    world: int
    _seed: int
    _prepared: list[Prepared]
    _dealt: list[ShardedLoader]
    _streams: Streams
    _joins: JoinedLoaders


class JobPlace:
    """Saves a job to disk and loads it. Every rank calls its methods. keep() adds what else has a state."""

    def __init__(self, job: SavedJob, token: int) -> None:
        self._job, self._token = job, token
        self._savers: dict[Path, Saver] = {}
        self._kept: dict[str, Any] = {}

    def keep(self, things: Mapping[str, Any]) -> None:
        """Have `save` and `load` treat what has `state_dict` and `load_state_dict`. Raises UsageError J23 for what has
        not, and for a name that is taken."""
        for name, thing in things.items():
            whole = callable(getattr(thing, "state_dict", None)) and callable(
                getattr(thing, "load_state_dict", None)
            )
            if not whole or self._kept.get(name, thing) is not thing:
                raise UsageError(
                    f"{name} is kept already" if whole else f"{name} has no state_dict and load_state_dict",
                    where=f"job.keep({name}={type(thing).__name__})",
                    fix="another name" if whole else "job.save(folder, {...}) for plain values",
                    code="J23",
                )
            self._kept[name] = thing

    def save(self, path: Path, state: Mapping[str, Any], keep: int | None) -> Path:
        """Writes `path/checkpoints/step-N` and returns it."""
        job, token = self._job, f"{self._token:x}"
        saver = self._savers.setdefault(path, Saver(path, job.rank, job.world, token=token, keep=keep))
        known = {
            "step": job.step,
            "plan": str(job.plan),
            "optim": [settings_of(prepared) for prepared in job._prepared],
            "data": [data.state for data in job._dealt],
            "random": all_states()[1:],
            "yours": dict(state),
        }
        pieces = [*self._tensors(), *self._random(), *self._things(), *self._joined()]
        saved = saver.save(job.step, pieces, known)
        if saved is None:
            raise RuntimeError("a blocking save returned no folder")
        return saved

    def load(self, path: Path) -> dict[str, Any] | None:
        """Load the last checkpoint. Return the `state` of its `save`, None where there is no checkpoint."""
        job = self._job
        checkpoint = path if (path / "manifest.json").is_file() else latest(path)
        if checkpoint is None:
            return None
        kept = load(checkpoint, [])
        for prepared, settings in zip(job._prepared, kept.get("optim", []), strict=False):
            make_room(prepared, kept_in(checkpoint))
            restore_settings(prepared, settings, checkpoint)
        names = set(tensor_names(checkpoint))
        job._streams.to_script()
        randomness = {piece.name: piece for piece in self._random() if piece.name in names}
        load(checkpoint, [*self._tensors(), *randomness.values()])
        for name, piece in randomness.items():
            if name == "random/outside":
                torch.set_rng_state(piece.tensor)
            else:
                job._streams.state = piece.tensor
        index, step = job.mesh.data.index, int(kept.get("step", 0))
        if not any(name != "random/outside" for name in randomness) and index:
            again = seed_of(job._seed, index, step)
            job._streams.state = torch.Generator().manual_seed(again).get_state()
        if "random" in kept:
            set_all_states([None, *kept["random"]], torch_too=False)
        for data, state in zip(job._dealt, kept.get("data", []), strict=False):
            data.state = state
        # A rank that was not there learns of the place.
        for name in (f"{JOINED}{job.mesh.data.index}", f"{JOINED}0"):
            if name in names:
                job._joins.state = json.loads(read_full(checkpoint, [name])[name].numpy().tobytes())
                break
        for name, thing in self._kept.items():
            if KEPT + name in names:
                state = read_full(checkpoint, [KEPT + name])[KEPT + name]
                thing.load_state_dict(decoded(state.numpy().tobytes()))
        job.step = step
        job.mesh.data.barrier()  # nobody may save over what another rank still reads
        return dict(kept.get("yours", {}))

    def _tensors(self) -> Iterator[Box]:
        mesh = self._job.mesh
        for prepared in self._job._prepared:
            yield from pieces_of(prepared, first=mesh.data.index == 0, first_replica=mesh.dp.index == 0)

    def _random(self) -> Iterator[Box]:
        """The script's random state, and every rank's own."""
        job = self._job
        job._streams.to_script()
        outside, rank_state = torch.get_rng_state(), job._streams.state
        yield Box("random/outside", tuple(outside.shape), (0,), outside, saved=job.rank == 0)
        if job.world > 1:
            yield Box(f"random/rank{job.rank}", tuple(rank_state.shape), (0,), rank_state)

    def _joined(self) -> Iterator[Box]:
        """Every rank's own place in data of its own; nothing of a script that has none."""
        if not (state := self._job._joins.state)["made"]:
            return
        yield _box_of(f"{JOINED}{self._job.mesh.data.index}", json.dumps(state).encode())

    def _things(self) -> Iterator[Box]:
        for name, thing in self._kept.items():
            data = encoded(_with_whole_tensors(thing.state_dict()))
            yield _box_of(KEPT + name, data, saved=self._job.rank == 0)


def _box_of(name: str, data: bytes, saved: bool = True) -> Box:
    return Box(name, (len(data),), (0,), torch.frombuffer(bytearray(data), dtype=torch.uint8), saved)


def _with_whole_tensors(state: Any) -> Any:
    """Replace shards by whole tensors. All ranks call it."""
    if isinstance(state, DTensor):
        return state.full_tensor()
    if isinstance(state, Mapping):
        return {key: _with_whole_tensors(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)) and not hasattr(state, "_fields"):
        return type(state)(_with_whole_tensors(value) for value in state)
    return state
