"""Checkpoints of `torch.distributed.checkpoint`: `.metadata` says which box of which tensor lies where.

torch itself unpickles `.metadata`; here it is read as data. Of a tensor only those chunks are read that a box meets.
"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.models.folder import unreadable
from unisono.models.weights import Shape, Weights
from unisono.train.foreign.inert import plain_pickle, saved

METADATA = ".metadata"
_OPTIMISERS = ("optim", "optimizer", "optimizers", "lr_scheduler", "scheduler")


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One box of a tensor, and where it lies."""

    start: Shape
    shape: Shape
    file: Path
    at: int
    length: int


class DcpWeights(Weights):
    """The tensors of a folder, those of optimisers left out."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        try:
            self._chunks, self.shapes = _read(folder)
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise unreadable(folder / METADATA, ValueError("it is no metadata of DCP's")) from error

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
        if "chunks" in about.state and name.partition(".")[0] not in _OPTIMISERS
    }
    places: dict[tuple[str, Shape], Any] = {}
    for index, info in metadata["storage_data"].items():
        if "fqn" in index.state and index.state["fqn"] in tensors:
            places[index.state["fqn"], tuple(index.state["offset"] or ())] = info.state
    chunks: dict[str, list[_Chunk]] = defaultdict(list)
    for name, about in tensors.items():
        for chunk in about["chunks"]:
            start, shape = tuple(chunk.state["offsets"]), tuple(chunk.state["sizes"])
            place = places[name, start]
            if place.get("transform_descriptors"):
                raise ValueError("its chunks are compressed")
            file = folder / Path(place["relative_path"]).name
            chunks[name].append(_Chunk(start, shape, file, place["offset"], place["length"]))
    return chunks, {name: tuple(about["size"]) for name, about in tensors.items()}


def is_dcp(folder: Path) -> bool:
    """Whether a folder is such a checkpoint."""
    return (folder / METADATA).is_file()
