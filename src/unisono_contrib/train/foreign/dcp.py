"""Checkpoints of `torch.distributed.checkpoint`: `.metadata` says which box of which tensor lies where.

torch itself unpickles `.metadata`; here it is read as data. Of a tensor only those chunks are read that a box meets.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.models.folder import unreadable
from unisono.models.weights import Shape, Weights, shape_of, size_of
from unisono.train.foreign.trained import Renamed, TrainedState
from unisono_contrib.train.foreign.inert import plain_pickle, saved
from unisono_contrib.train.foreign.machine import listed

METADATA = ".metadata"
_OPTIMISERS = ("optim", "optimizer", "optimizers", "lr_scheduler", "scheduler")
_BESIDE = re.compile(
    rf"(?:.*\.)?(?:{'|'.join(_OPTIMISERS)})\.(?P<what>state|param_groups)\.(?P<of>.+)\.(?P<key>[^.]+)"
)
"""Names of optimisers' tensors and settings, flattened by parameter or not: `optim.state.PARAMETER.exp_avg`."""
_LONGEST = 4096  # letters of a name that is looked at
_SETTINGS = 1 << 20  # bytes of one setting, as torch.save writes it


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One box of a tensor, and where it lies."""

    start: Shape
    shape: Shape
    file: Path
    at: int
    length: int


class DcpWeights(Weights):
    """The tensors of a folder. all_tensors: those of optimisers too, which are left out else."""

    def __init__(self, folder: Path, all_tensors: bool = False) -> None:
        self.where = str(folder)
        try:
            self._chunks, shapes = _read(folder)
            self.shapes = {n: shape for n, shape in shapes.items() if all_tensors or not _is_beside(n)}
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise unreadable(
                folder / METADATA, ValueError(f"it is no metadata of DCP's ({error})")
            ) from error

    def box(self, name: str, start: Shape, shape: Shape) -> Tensor:
        out: Tensor | None = None
        for chunk in self._chunks[name]:
            first = tuple(map(max, chunk.start, start))
            end = [
                min(a + n, b + m) for a, n, b, m in zip(chunk.start, chunk.shape, start, shape, strict=True)
            ]
            if any(e <= f for e, f in zip(end, first, strict=True)):
                continue
            stored = saved(chunk.file, chunk.at, chunk.length)
            if not isinstance(stored, Tensor) or tuple(stored.shape) != chunk.shape:
                raise unreadable(chunk.file, ValueError(f"{name} is not what the metadata says"))
            part = stored[tuple(slice(f - a, e - a) for f, e, a in zip(first, end, chunk.start, strict=True))]
            if part.shape == torch.Size(shape):
                return part
            out = stored.new_empty(shape) if out is None else out
            out[tuple(slice(f - s, e - s) for f, e, s in zip(first, end, start, strict=True))] = part
        if out is None:
            raise unreadable(Path(self.where), ValueError(f"no chunk of {name} holds what is wanted"))
        return out


def _read(folder: Path) -> tuple[dict[str, list[_Chunk]], dict[str, Shape]]:
    metadata = plain_pickle(folder / METADATA).state
    tensors = {
        name: about.state
        for name, about in metadata["state_dict_metadata"].items()
        if "chunks" in about.state
    }
    places: dict[str, Any] = {}
    for index, info in metadata["storage_data"].items():
        if "fqn" in index.state and index.state["fqn"] in tensors:
            places[_place(index.state["fqn"], index.state["offset"] or ())] = info.state
    # A list of chunks that many tensors share is a few bytes of the pickle.
    if sum(len(listed(about["chunks"])) for about in tensors.values()) > len(places):
        raise ValueError("it names more chunks than places")
    chunks: dict[str, list[_Chunk]] = defaultdict(list)
    for name, about in tensors.items():
        for chunk in about["chunks"]:
            start, shape = shape_of(chunk.state["offsets"]), shape_of(chunk.state["sizes"])
            place = places[_place(name, start)]
            if place.get("transform_descriptors"):
                raise ValueError("its chunks are compressed")
            file = folder / Path(place["relative_path"]).name
            chunks[name].append(
                _Chunk(start, shape, file, size_of(place["offset"]), size_of(place["length"]))
            )
    _check_lengths(chunk for group in chunks.values() for chunk in group)
    return chunks, {name: shape_of(about["size"]) for name, about in tensors.items()}


def _is_beside(name: str) -> bool:
    return name.partition(".")[0] in _OPTIMISERS or _parted(name) is not None


def _parted(name: str) -> re.Match[str] | None:
    return _BESIDE.fullmatch(name) if len(name) < _LONGEST else None


def open_state(folder: Path) -> TrainedState:
    """Weights, optimiser state, settings and step of a folder that a training loop saved. Raises UsageError W01, W05;
    K07 where it holds no optimiser state."""
    tensors = DcpWeights(folder, all_tensors=True)
    moments: dict[str, dict[str, str]] = defaultdict(dict)
    for name in tensors.shapes:
        if (parts := _parted(name)) is not None and parts["what"] == "state":
            moments[parts["key"]][parts["of"]] = name
    plain = [name for name in tensors.shapes if not _is_beside(name)]
    weights = Renamed(tensors, {name: name for name in plain})
    values, groups = _settings(folder)
    return TrainedState.joined(
        weights, {k: Renamed(tensors, names) for k, names in moments.items()}, values, groups
    )


def _settings(folder: Path) -> tuple[Mapping[str, Any], Mapping[str, Mapping[str, Any]]]:
    """(values at the top, such as `step`; settings of optimisers by group's number or parameter's name)."""
    metadata = plain_pickle(folder / METADATA).state
    values: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = defaultdict(dict)
    for index, info in metadata["storage_data"].items():
        name, place = index.state["fqn"], info.state
        parts = _parted(name)
        is_group = parts is not None and parts["what"] == "param_groups"
        about = metadata["state_dict_metadata"][name]
        if "chunks" in about.state or not (is_group or "." not in name):
            continue
        if size_of(place["length"]) > _SETTINGS:
            continue
        file = folder / Path(place["relative_path"]).name
        value = saved(file, size_of(place["offset"]), place["length"])
        if parts is not None:
            groups[parts["of"]][parts["key"]] = value
        else:
            values[name] = value
    return values, groups


def _place(name: str, start: Any) -> str:
    """A chunk's key. A tuple would be none: its hash is no secret, and many can be found that have the same."""
    return f"{name} {shape_of(start)}"


def _check_lengths(chunks: Iterable[_Chunk]) -> None:
    """Raises ValueError where the chunks of a file have more bytes than it has: each would be read as often as it is
    named."""
    named = Counter[Path]()
    for chunk in chunks:
        named[chunk.file] += chunk.length
    for file, length in named.items():
        if file.is_file() and length > file.stat().st_size:
            raise ValueError(f"the chunks of {file.name} have more bytes than it has")


def is_dcp(folder: Path) -> bool:
    """Whether a folder is such a checkpoint."""
    return (folder / METADATA).is_file()
