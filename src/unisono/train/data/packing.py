"""Documents in windows: several whole ones a window, or one, padded. No target reaches into another document.

`pieces` says which documents lie together. Which documents lie in which window is computed once for
tokens, window and split. It lies in the cache of tokens, and every rank and every later run maps it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unisono.spec.errors import UsageError
from unisono.spec.training import IGNORED
from unisono.train.data import cache
from unisono.train.data.pieces import Pieces, filled
from unisono.train.data.tokenised.build import Tokens
from unisono.train.data.worker_pool import on_stderr

FORMAT = 1  # of what lies in the cache, and of how documents are packed
_ARRAYS = ("first", "size", "counted", "order", "begins", "sums")


@dataclass(frozen=True, slots=True)
class PackedWindows:
    """Windows of several documents each.

    tokens: [n], memory-mapped. marks: uint8 [n], 1 for each token that counts as a target; None where all do. order,
    begins: of the pieces, see `packed`. sums: targets of each window that count, int64. several: whether a window may
    hold more than one document; where it holds one, only padding is behind it, which a causal model does not see.
    """

    tokens: np.ndarray
    marks: np.ndarray | None
    pieces: Pieces
    order: np.ndarray
    begins: np.ndarray
    sums: np.ndarray
    window: int
    several: bool = True

    @classmethod
    def of(
        cls, tokens: np.ndarray, ends: np.ndarray, marks: np.ndarray | None, window: int, several: bool,
        documents: range,
    ) -> "tuple[PackedWindows, int]":  # fmt: skip
        """(windows of some of the documents, pieces that were left out)."""
        pieces, order, begins, sums, left_out = filled(ends, marks, window, several, documents)
        return cls(tokens, marks, pieces, order, begins, sums, window, several), left_out

    def __len__(self) -> int:
        return len(self.begins) - 1

    def _held(self, index: int) -> Sequence[tuple[int, int]]:
        """(first token, size) of each piece of a window."""
        held = self.order[self.begins[index] : self.begins[index + 1]]
        return list(zip(self.pieces.first[held].tolist(), self.pieces.size[held].tolist(), strict=True))

    def fetch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """inputs, targets: int64 [n, window]; targets that do not count are -100, inputs behind the last document 0."""
        inputs = np.zeros((len(indices), self.window), dtype=np.int64)
        targets = np.full_like(inputs, IGNORED)
        for row, index in enumerate(indices.tolist()):
            at = 0
            for first, size in self._held(index):
                here = slice(at, at + size)
                inputs[row, here] = self.tokens[first : first + size]
                wanted = self.tokens[first + 1 : first + 1 + size].astype(np.int64)
                if self.marks is not None:
                    wanted = np.where(self.marks[first + 1 : first + 1 + size], wanted, IGNORED)
                targets[row, here] = wanted
                at += size
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def counted(self, indices: np.ndarray) -> np.ndarray:
        """int64 [n], targets of these windows that count."""
        return self.sums[indices]

    def documents(self, indices: np.ndarray) -> Tensor | None:
        """int64 [n, window], numbered from 0 in each window; padding is one by itself."""
        if not self.several:
            return None
        ids = np.zeros((len(indices), self.window), dtype=np.int64)
        for row, index in enumerate(indices.tolist()):
            sizes = [size for _, size in self._held(index)]
            ids[row] = np.repeat(np.arange(len(sizes) + 1), [*sizes, self.window - sum(sizes)])
        return torch.from_numpy(ids)


def packed_windows(
    tokens: Tokens, cached: str, window: int, several: bool, documents: range
) -> tuple[PackedWindows, int]:
    """(windows of some of the documents, pieces that were left out), as `PackedWindows.of` makes them; from the cache
    if they were made before. A cache that takes nothing more is done without."""

    def make(out: Path) -> Mapping[str, Any]:
        windows, left_out = computed()
        for name, array in zip(_ARRAYS, _arrays_of(windows), strict=True):
            np.ascontiguousarray(array, dtype=np.int64).tofile(out / name)
        return {"pieces": len(windows.order), "windows": len(windows), "left_out": left_out}

    def computed() -> tuple[PackedWindows, int]:
        return PackedWindows.of(tokens.tokens, tokens.ends, tokens.marks, window, several, documents)

    key = {
        "format": FORMAT,
        "tokens": tokens.folder.name,  # which says what went in
        "window": window,
        "several": several,
        "documents": [documents.start, documents.stop],
    }
    try:
        at, meta = cache.kept(
            cached, "windows", key, make, lambda: on_stderr("another process is packing this data: waiting\n")
        )
    except UsageError as error:
        if error.code != "D15":
            raise
        return computed()
    pieces, windows = meta["pieces"], meta["windows"]
    counts = (pieces, pieces, pieces, pieces, windows + 1, windows)
    first, size, counted, order, begins, sums = (
        _mapped(at / name, count) for name, count in zip(_ARRAYS, counts, strict=True)
    )
    cut = tokens.tokens, tokens.marks, Pieces(first, size, counted)
    return PackedWindows(*cut, order, begins, sums, window, several), meta["left_out"]


def _arrays_of(windows: PackedWindows) -> tuple[np.ndarray, ...]:
    pieces = windows.pieces
    return pieces.first, pieces.size, pieces.counted, windows.order, windows.begins, windows.sums


def _mapped(path: Path, count: int) -> np.ndarray:
    """An empty file cannot be mapped."""
    if not count:
        return np.zeros(0, dtype=np.int64)
    return np.memmap(path, dtype=np.int64, mode="r", shape=(count,))
