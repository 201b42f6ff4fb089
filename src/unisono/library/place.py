"""Checkpoints of a job: models, optimisers, random states, what else the script keeps, and the place in the data."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from unisono.library.noise import all_states, seed_of, set_all_states
from unisono.library.objects import decoded, encoded
from unisono.library.state import make_room, pieces_of, restore_settings, settings_of
from unisono.spec.errors import UsageError
from unisono.train.state.checkpoint import Box, Saver, latest, load, read_full, tensor_names

if TYPE_CHECKING:
    from unisono.library.job import Job

KEPT = "kept/"  # before the names of what a script keeps besides
JOINED = "joined/rank"  # before a rank's number, its place in data of its own


class JobPlace:
    """Where a job stands, on disk. Every rank calls its methods. keep() adds what else has a state."""

    def __init__(self, job: "Job", token: int) -> None:
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
            "optim": [settings_of(one) for one in job._prepared],
            "data": [data.state for data in job._dealt],
            "random": all_states()[1:],
            "yours": dict(state),
        }
        pieces = [*self._tensors(), *self._random(), *self._things(), *self._joined()]
        made = saver.save(job.step, pieces, known)
        if made is None:
            raise RuntimeError("a blocking save returned no folder")
        return made

    def load(self, path: Path) -> dict[str, Any] | None:
        """Goes on from the last checkpoint; returns the `state` given to `save`, or None where there is none."""
        job = self._job
        found = path if (path / "manifest.json").is_file() else latest(path)
        if found is None:
            return None
        kept = load(found, [])
        for one, settings in zip(job._prepared, kept.get("optim", []), strict=False):
            make_room(one, found)
            restore_settings(one, settings, found)
        names = set(tensor_names(found))
        job._streams.to_script()
        randomness = {piece.name: piece for piece in self._random() if piece.name in names}
        load(found, [*self._tensors(), *randomness.values()])
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
        for name in (
            f"{JOINED}{job.mesh.data.index}",
            f"{JOINED}0",
        ):  # a rank that was not there learns of the place
            if name in names:
                job._joins.state = json.loads(read_full(found, [name])[name].numpy().tobytes())
                break
        for name, thing in self._kept.items():
            if KEPT + name in names:
                state = read_full(found, [KEPT + name])[KEPT + name]
                thing.load_state_dict(decoded(state.numpy().tobytes()))
        job.step = step
        job.mesh.data.barrier()  # nobody may save over what another rank still reads
        return dict(kept.get("yours", {}))

    def _tensors(self) -> Iterator[Box]:
        mesh = self._job.mesh
        for one in self._job._prepared:
            yield from pieces_of(one, first=mesh.data.index == 0, first_replica=mesh.dp.index == 0)

    def _random(self) -> Iterator[Box]:
        """The script's random state, and every rank's own."""
        job = self._job
        job._streams.to_script()
        outside, own = torch.get_rng_state(), job._streams.state
        yield Box("random/outside", tuple(outside.shape), (0,), outside, saved=job.rank == 0)
        if job.world > 1:
            yield Box(f"random/rank{job.rank}", tuple(own.shape), (0,), own)

    def _joined(self) -> Iterator[Box]:
        """Every rank's own place in data of its own; nothing of a script that has none."""
        if not (state := self._job._joins.state)["made"]:
            return
        line = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
        yield Box(f"{JOINED}{self._job.mesh.data.index}", tuple(line.shape), (0,), line)

    def _things(self) -> Iterator[Box]:
        for name, thing in self._kept.items():
            line = torch.frombuffer(bytearray(encoded(_whole(thing.state_dict()))), dtype=torch.uint8)
            yield Box(KEPT + name, tuple(line.shape), (0,), line, saved=self._job.rank == 0)


def _whole(state: Any) -> Any:
    """With whole tensors where there are shards: all ranks call it."""
    if isinstance(state, DTensor):
        return state.full_tensor()
    if isinstance(state, Mapping):
        return {key: _whole(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)) and not hasattr(state, "_fields"):
        return type(state)(_whole(value) for value in state)
    return state
