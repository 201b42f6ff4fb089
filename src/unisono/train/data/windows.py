"""Packed windows in the cache of tokens: which documents lie in which window is computed once for tokens, window and
split, and mapped from then on, by every rank and every later run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from unisono.spec.errors import UsageError
from unisono.train.data import cache
from unisono.train.data.packing import PackedWindows, Pieces
from unisono.train.data.tokenised.build import Tokens
from unisono.train.data.worker_pool import on_stderr

FORMAT = 1  # of what lies in the cache, and of how documents are packed
_ARRAYS = ("first", "size", "counted", "order", "begins", "sums")


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
