"""The weights of a checkpoint by their names, each put together when it is asked for."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from unisono.models.lora import is_adapter, merged, pair_of, plain
from unisono.train.state.checkpoint import read_full
from unisono.train.state.checkpoint.read import AVERAGE, MODEL, parameters_of
from unisono.train.state.checkpoint.tensorfile import DTYPES


@dataclass(slots=True)
class StoredWeights(Mapping[str, Tensor]):
    """Whole tensors of parameters by the names that they have without adapters; those are merged into them.

    scale: of the adapters. dtype: in which they are given; as stored where it is None. shapes: of all of them.
    averaged: the averages over updates, of those parameters that have one.
    """

    folder: Path
    scale: float = 1.0
    dtype: torch.dtype | None = None
    averaged: bool = False
    shapes: dict[str, tuple[int, ...]] = field(init=False)
    stored: dict[str, str] = field(init=False)  # our name → what it is called there
    adapters: dict[str, tuple[int, ...]] = field(init=False)  # name → shape
    averages: frozenset[str] = field(init=False)  # names, as stored, of those that are given averaged
    _last: tuple[str, Tensor] | None = None

    def __post_init__(self) -> None:
        entries = parameters_of(self.folder)
        held = {name: tuple(entry.shape) for name, entry in entries.items()}
        self.adapters = {name: shape for name, shape in held.items() if is_adapter(name)}
        self.stored = {plain(name): name for name in held if name not in self.adapters}
        self.shapes = {name: held[stored] for name, stored in self.stored.items()}
        averages = parameters_of(self.folder, AVERAGE) if self.averaged else ()
        self.averages = frozenset(averages)
        if self.dtype is None:
            dtype = next((entries[name].dtype for name in self.stored.values()), "F32")
            self.dtype = DTYPES[dtype]

    def __getitem__(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = name, self._read(name)
        return self._last[1]

    def _read(self, name: str) -> Tensor:
        whole = self.raw(self.stored[name])
        layer, _, kind = name.rpartition(".")
        (a, b), (rows, back) = pair_of(layer)
        if kind == "weight" and a in self.adapters:
            whole = merged(whole, self.raw(a), self.raw(b), self.scale)
        elif kind == "weight" and rows in self.adapters:
            whole = merged(whole, self.raw(back).T, self.raw(rows), self.scale)
        return whole.to(self.dtype) if whole.is_floating_point() else whole

    def raw(self, name: str) -> Tensor:
        """One tensor by the name under which it is stored, as it is there. Raises UsageError K01."""
        full = (AVERAGE if name in self.averages else MODEL) + name
        return read_full(self.folder, [full])[full]

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)
