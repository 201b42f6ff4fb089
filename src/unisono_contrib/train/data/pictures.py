"""A folder of pictures, a folder a class, decoded once into a memory-mapped cache."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unisono.config import DataConfig
from unisono.spec.errors import UsageError
from unisono.train.data import cache
from unisono.train.data.dataset import Corpus, require_samples
from unisono.train.data.load import fingerprint
from unisono.train.data.order import sample_ids
from unisono.train.data.worker_pool import on_stderr, progress, served
from unisono_contrib.train.data.folders import classes_of, listed

_FORMAT, _PART, _SPLIT_SEED = 1, 256, 0
_WORKER = "unisono_contrib.train.data.decoding"


@dataclass(frozen=True, slots=True)
class DecodedPictures:
    """Some of the pictures of a cache. pixels: uint8 [n, C, H, W], memory-mapped. labels: int64 [n]. chosen: which."""

    pixels: np.ndarray
    labels: np.ndarray
    chosen: np.ndarray

    def __len__(self) -> int:
        return len(self.chosen)

    def fetch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """inputs float32 [n, C, H, W] in 0..1, targets int64 [n]."""
        at = self.chosen[indices]
        pixels = self.pixels[at].astype(np.float32)
        pixels /= 255.0
        return torch.from_numpy(pixels), torch.from_numpy(self.labels[at])


def picture_corpus(folder: str, shape: tuple[int, ...], data: DataConfig) -> Corpus:
    """The pictures of a folder in this shape; some of them, always the same, are held out. Raises UsageError D02, D04,
    D10, D14 (a picture that cannot be read), D15 (the cache cannot be written)."""
    files, names = listed(folder), classes_of(folder)
    identities = [_identity(path) for path, _ in files]
    key = {"format": _FORMAT, "shape": list(shape), "skip_bad": data.skip_bad, "files": identities}

    def make(out: Path) -> Mapping[str, Any]:
        return _make(files, list(shape), out, data)

    at, meta = cache.kept(
        data.cache,
        "pictures",
        key,
        make,
        lambda: on_stderr("another process is decoding these pictures: waiting\n"),
    )
    labels = np.fromfile(at / "labels", dtype=np.int64)
    require_samples(len(labels), 1, folder)
    pixels = np.memmap(at / "pixels", dtype=np.uint8, mode="r").reshape(-1, *shape)
    mixed = sample_ids(_SPLIT_SEED, 0, len(labels), len(labels))
    cut = len(mixed) - int(len(mixed) * data.val_fraction)
    return Corpus(
        train=DecodedPictures(pixels, labels, mixed[:cut]),
        val=DecodedPictures(pixels, labels, mixed[cut:]),
        vocab=None,
        classes=len(names),
        sample_shape=tuple(shape),
        decode=None,
        encode=None,
        fingerprint=fingerprint(pixels, labels, whole=False),
        origin=folder,
        notes=(f"{meta['left_out']:,} pictures of {folder} were left out",) if meta["left_out"] else (),
    )


def _identity(path: str) -> tuple[str, int, int]:
    """What it is known by: path, size, time of its last change; of a link to nothing its path."""
    try:
        stat = os.stat(path)
    except OSError:
        return path, -1, 0
    return path, stat.st_size, stat.st_mtime_ns


def _make(files: list[tuple[str, int]], shape: list[int], out: Path, data: DataConfig) -> Mapping[str, Any]:
    parts = [files[i : i + _PART] for i in range(0, len(files), _PART)]
    jobs = [
        {"files": [f for f, _ in part], "shape": shape, "out": str(out / str(i))}
        for i, part in enumerate(parts)
    ]
    begun, bad, done = time.monotonic(), dict[str, str](), [0]

    def heard(at: int, answer: Mapping[str, Any]) -> bool:
        for number, why in answer["bad"]:
            path = parts[at][number][0]
            if not data.skip_bad:
                raise UsageError(
                    f"a picture cannot be read: {why}",
                    code="D14",
                    where=path,
                    fix="mend or remove it, or data.skip_bad = true, which leaves such out and counts them",
                )
            bad[path] = why
        done[0] += len(parts[at])
        on_stderr(progress("decoding", done[0], len(files), "pictures", time.monotonic() - begun))
        return True

    served(_WORKER, data.workers or len(os.sched_getaffinity(0)), jobs, str(out), heard)
    on_stderr(progress("decoding", len(files), len(files), "pictures", time.monotonic() - begun) + "\n")
    cache.joined([out / str(i) for i in range(len(parts))], out / "pixels")
    np.array([label for path, label in files if path not in bad], dtype=np.int64).tofile(out / "labels")
    for path, why in sorted(bad.items())[:5]:
        on_stderr(f"left out {path}: {why}\n")
    return {"left_out": len(bad)}
