"""What ranks and data hosts say to each other: who knows which secret, what data it is, and samples in few bytes.

A rank names samples by number, so any host can serve any of them. Tensors travel in the narrowest numbers that hold
them: pictures as the bytes that they were decoded to, tokens as bytes where there are no more than 256.
"""

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.config import DataConfig
from unisono.spec.errors import UsageError
from unisono.spec.paths import at_home
from unisono.train.data.dataset import Corpus

VERSION = 1
BEAT = 2.0
"""Seconds between two signs of life of a host that reads."""
SILENCE = 15.0
"""Seconds without one after which it is given up."""
_NARROW = (torch.uint8, torch.int16, torch.int32)
_WHITE = 255.0


def token_of(data: DataConfig, makes: bool = False) -> bytes:
    """The secret that ranks and hosts share. makes: a new one where there is none. Raises UsageError D20."""
    path = at_home(data.hosts_token) if data.hosts_token else at_home(data.cache) / "hosts.token"
    try:
        if makes:
            _make(path)
        token = path.read_bytes().strip()
    except OSError as error:
        raise _misfit(
            f"the secret of data hosts cannot be read: {error.strerror}", str(path),
            "data.hosts_token = FILE, a copy of hosts.token in data.cache of a data host",
        ) from error  # fmt: skip
    if len(token) < 16:
        raise _misfit(f"a secret of {len(token)} letters", str(path), "a file with 16 letters or more")
    return token


def _make(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(aside, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    try:
        os.link(aside, path)  # of two that make one, the first counts
    except FileExistsError:
        pass
    finally:
        aside.unlink()


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


def differing(where: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> UsageError | None:
    """The error for a host of other data; None where it is the same."""
    odd = [f"{key} {theirs.get(key)}, not {ours[key]}" for key in ours if theirs.get(key) != ours[key]]
    if not odd:
        return None
    return _misfit(
        f"a data host has other data: {'; '.join(odd)}", where, "the same recipe and shards on all of them"
    )


def stranger(where: str) -> UsageError:
    """The error for a host that has another secret."""
    return _misfit(
        "a data host does not know the secret",
        where,
        "data.hosts_token = FILE, the same text on ranks and data hosts",
    )


def _misfit(what: str, where: str, fix: str) -> UsageError:
    return UsageError(what, code="D20", where=where, fix=fix)


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
