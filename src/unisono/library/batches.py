"""What a batch consists of, and parts of it: arrays whose first dim counts samples, in any nesting."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unisono.comm.device import is_apart

GLANCE = 64  # numbers at each end of an array that say which batch it is


def digest(data: bytes) -> int:
    """Eight bytes that say whether two ranks saw the same."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def leaves_of(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        for inner in batch:
            yield from leaves_of(inner)
    else:
        yield batch


def is_array(x: Any) -> bool:
    return isinstance(x, (Tensor, np.ndarray)) and x.ndim > 0


def samples_in(batch: Any) -> int:
    """Samples of a batch: the first dim of its first array; 0 if there is none."""
    return next((x.shape[0] for x in leaves_of(batch) if is_array(x)), 0)


def digest_of(batch: Any) -> int:
    """Return a digest of all numbers of a batch."""
    return digest(b"".join(_bytes(x) for x in leaves_of(batch) if is_array(x)))


def glance_at(batch: Any) -> int:
    """Return a digest of shapes, and of the ends of arrays on the CPU: it shows that batches come in another order."""
    seen = [repr(tuple(x.shape)).encode() for x in leaves_of(batch) if is_array(x)]
    for x in leaves_of(batch):
        if is_array(x) and not (isinstance(x, Tensor) and is_apart(x)):
            flat = x.reshape(-1)
            seen += [_bytes(flat[:GLANCE]), _bytes(flat[-GLANCE:])]
    return digest(b"".join(seen))


def _bytes(x: Any) -> bytes:
    if isinstance(x, Tensor):
        x = x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(x).tobytes()


def cut(batch: Any, count: int, low: int, high: int) -> Any:
    """Samples [low, high) of a batch of `count`: every array with as many rows is cut, and so is a list of as many
    plain values; the rest stays whole."""
    if is_array(batch):
        return batch[low:high] if batch.shape[0] == count else batch
    if isinstance(batch, Mapping):
        kept = {key: cut(value, count, low, high) for key, value in batch.items()}
        return kept if type(batch) is dict else _like(batch, kept)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(cut(x, count, low, high) for x in batch))
    if isinstance(batch, (list, tuple)):
        if len(batch) == count and not any(
            is_array(x) or isinstance(x, (list, tuple, Mapping)) for x in batch
        ):
            return batch[low:high]
        return type(batch)(cut(x, count, low, high) for x in batch)
    return batch


def _like(batch: Mapping[Any, Any], kept: dict[Any, Any]) -> Any:
    try:
        return type(batch)(kept)  # type: ignore[call-arg]
    except TypeError:
        return kept
