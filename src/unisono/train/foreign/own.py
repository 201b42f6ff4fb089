"""The weights of a run of ours, or of one of its checkpoints, every byte verified as it is read."""

from pathlib import Path

import torch
from torch import Tensor

from unisono.models.folder import unreadable
from unisono.models.weights import Shape, Weights
from unisono.spec.runs import CHECKPOINTS
from unisono.train.state.checkpoint import Box, latest, load
from unisono.train.state.checkpoint.faults import damaged
from unisono.train.state.checkpoint.manifest import read_manifest
from unisono.train.state.checkpoint.tensorfile import DTYPES, Damage

_PREFIX = "model/"


class OwnWeights(Weights):
    """The parameters of one checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.where, self._folder = str(folder), folder
        try:
            tensors = read_manifest(folder).tensors
        except Damage as damage:
            raise damaged(folder, damage) from damage
        held = {n.removeprefix(_PREFIX): e for n, e in tensors.items() if n.startswith(_PREFIX)}
        self.shapes = {name: tuple(entry.shape) for name, entry in held.items()}
        self.dtypes = {name: DTYPES[entry.dtype] for name, entry in held.items()}

    def box(self, name: str, start: Shape, shape: Shape) -> Tensor:
        out = torch.empty(shape, dtype=self.dtypes[name])
        load(self._folder, [Box(_PREFIX + name, self.shapes[name], start, out)])
        return out


def open_own(folder: Path) -> OwnWeights:
    """Open the weights of a run's folder, or of a checkpoint's. Raises UsageError W01 and K01."""
    if folder.parent.name == CHECKPOINTS:
        return OwnWeights(folder)
    checkpoint = latest(folder)
    if checkpoint is None:
        raise unreadable(folder, ValueError("the run has no checkpoint"))
    return OwnWeights(checkpoint)
