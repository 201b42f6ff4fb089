"""What ranks and data hosts say to each other: what data it is, and samples in few bytes.

A rank names samples by number, so any host can serve any of them. Tensors travel in the narrowest numbers that hold
them: pictures as the bytes that they were decoded to, tokens as bytes where there are no more than 256.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.config import DataConfig
from unisono.train.data.dataset import Corpus

VERSION = 1
BEAT = 2.0
"""Seconds between two signs of life of a host that reads."""
_NARROW = (torch.uint8, torch.int16, torch.int32)
_WHITE = 255.0


def facts_of(corpus: Corpus, data: DataConfig) -> dict[str, Any]:
    """What ranks and hosts have to agree on, in JSON."""
    return {
        "version": VERSION,
        "fingerprint": corpus.fingerprint,
        "samples": [len(corpus.train), len(corpus.val)],
        "shape": list(corpus.sample_shape),
        "packing": data.packing,
        "transform": data.transform,
    }


def narrowed(tensors: Sequence[Tensor]) -> tuple[list[str], list[Tensor]]:
    """(how `widened` makes them again, the same numbers in fewer bytes)."""
    how, narrow = [], []
    for x in tensors:
        small, name = x, str(x.dtype).removeprefix("torch.")
        if x.dtype == torch.int64 and x.numel():
            low, high = int(x.min()), int(x.max())
            fits = (d for d in _NARROW if torch.iinfo(d).min <= low and high <= torch.iinfo(d).max)
            small = x.to(next(fits, x.dtype))
        elif x.dtype == torch.float32 and x.numel() and 0.0 <= float(x.min()) <= float(x.max()) <= 1.0:
            bytes_of = (x * _WHITE).round().to(torch.uint8)
            if torch.equal(bytes_of.to(x.dtype) / _WHITE, x):
                small, name = bytes_of, "pixels"
        how.append(name)
        narrow.append(small)
    return how, narrow


def widened(how: Sequence[str], tensors: Sequence[Tensor]) -> list[Tensor]:
    """What `narrowed` was called with, to the bit."""
    return [
        x.to(torch.float32) / _WHITE if name == "pixels" else x.to(getattr(torch, name))
        for name, x in zip(how, tensors, strict=True)
    ]
