"""Global batches, dealt: every rank walks the same batches and takes its own part of the samples of each.

A loader with a batch sampler fetches only the samples of this rank; anything else that yields batches is cut. Parts
differ by one sample at most. A rank without a sample gets one of another rank's, with weight 0, so that every
rank makes the same steps.
"""

import copy
import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from unisono.comm.device import is_apart
from unisono.library.explain import explained
from unisono.library.small import Small
from unisono.spec.errors import UsageError


@dataclass(slots=True)
class BatchWeight:
    """What the batch at hand weighs on this rank: its samples times the ranks, over all samples; 1 if all have alike.

    A mean over the global batch is the mean over ranks of (ratio x mean over the rank's own samples).
    borrowed: the samples at hand are another rank's and count nowhere here.
    """

    ratio: float = 1.0
    borrowed: bool = False


def part(count: int, index: int, size: int) -> tuple[int, int]:
    """The samples [low, high) of a batch of `count` that fall to rank `index` of `size`."""
    return index * count // size, (index + 1) * count // size


class Slices:
    """A batch sampler that gives this rank's part of each batch of another. Unknown attributes are the other's."""

    def __init__(self, batches: Any, index: int, size: int) -> None:
        self._batches, self._index, self._size = batches, index, size
        self.latest: deque[tuple[int, int, int]] = (
            deque()
        )  # of the newest walk: (mine, all, digest of the first)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[Any]]:
        self.latest = deque()
        return self._walk(self.latest)

    def _walk(self, told: deque[tuple[int, int, int]]) -> Iterator[list[Any]]:
        for number, batch in enumerate(self._batches):
            batch = list(batch)
            low, high = part(len(batch), self._index, self._size)
            told.append((high - low, len(batch), digest(repr(batch).encode()) if number == 0 else 0))
            yield batch[low:high] or batch[:1]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_batches" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._batches, name)


class DealtLoader:
    """This rank's parts of the batches of `data`, and what each weighs. Length and attributes are those of `data`."""

    def __init__(self, data: Any, share: BatchWeight, small: Small) -> None:
        self._share, self._small = share, small
        self._slices: Slices | None = None
        self._data = data
        _refuse(data)
        # A stream has no samples to choose among: its loader's batch sampler says how many come next.
        chosen = isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset)
        if chosen and data.batch_sampler is not None:
            self._slices = Slices(data.batch_sampler, small.group.index, small.group.size)
            self._data = copy.copy(data)
            # A loader guards these names against assignment, for its own iterators may be on their way; this copy's
            # are not.
            vars(self._data).update(batch_sampler=self._slices, _iterator=None)

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[Any]:
        with explained():
            self._one_randomness()
            batches = iter(self._data)
            walk = self._whole(batches) if self._slices is None else self._own(batches, self._slices.latest)
            for number, (batch, mine, count, seen) in enumerate(walk):
                if number == 0:
                    self._agree(seen)
                self._share.ratio, self._share.borrowed = mine * self._small.group.size / count, mine == 0
                yield batch
            self._share.ratio, self._share.borrowed = 1.0, False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_data" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._data, name)

    def _own(
        self, batches: Iterator[Any], told: deque[tuple[int, int, int]]
    ) -> Iterator[tuple[Any, int, int, int]]:
        for batch in batches:
            yield batch, *told.popleft()

    def _whole(self, batches: Iterator[Any]) -> Iterator[tuple[Any, int, int, int]]:
        index, size = self._small.group.index, self._small.group.size
        for number, batch in enumerate(batches):
            count = samples_in(batch)
            if not count:
                raise UsageError(
                    f"batch {number} has no tensor with samples along its first dim",
                    where=f"a batch of type {type(batch).__name__}",
                    fix="yield tensors (or tuples, lists, dicts of them) whose dim 0 counts the samples",
                    code="J03",
                )
            low, high = part(count, index, size)
            own = cut(batch, count, *((low, high) if high > low else (0, 1)))
            yield own, high - low, count, _digest_of(batch) if number == 0 else 0

    def _one_randomness(self) -> None:
        """Rank 0's random state decides the order of this pass on every rank."""
        generator = getattr(self._data, "generator", None) or torch.default_generator
        if isinstance(generator, torch.Generator) and not is_apart(generator.device):
            state = self._small.from_first(generator.get_state())
            if self._small.group.index:
                generator.set_state(state)

    def _agree(self, seen: int) -> None:
        others = self._small.gather(seen)
        strangers = [rank for rank, other in enumerate(others) if other != others[0]]
        if strangers:
            raise UsageError(
                f"the data's first batch on rank {strangers[0]} is not the one on rank 0",
                where=type(self._data).__name__,
                likely="each rank shuffles or draws for itself, or has other files",
                fix="the same seed on every rank; `data` yields global batches and is cut here",
                code="J04",
            )


def _refuse(data: Any) -> None:
    if isinstance(data, Dataset) and not isinstance(data, DataLoader):
        raise UsageError(
            "a data set yields samples, and what is dealt is batches",
            where=type(data).__name__,
            fix="job.prepare(model, optimizer, DataLoader(dataset, batch_size=...))",
            code="J03",
        )
    sampler = getattr(data, "sampler", None)
    inner = getattr(getattr(data, "batch_sampler", None), "sampler", None)
    if isinstance(sampler, DistributedSampler) or isinstance(inner, DistributedSampler):
        raise UsageError(
            "the loader is split among ranks already",
            where="DistributedSampler",
            fix="leave the DistributedSampler out and let batch_size be the global batch",
            code="J03",
        )
    if not isinstance(data, Iterable):
        raise UsageError(
            f"{type(data).__name__} cannot be walked",
            fix="a DataLoader or any iterable of batches",
            code="J03",
        )


def digest(data: bytes) -> int:
    """Eight bytes that say whether two ranks saw the same."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        for inner in batch:
            yield from _leaves(inner)
    else:
        yield batch


def _is_array(x: Any) -> bool:
    return isinstance(x, (Tensor, np.ndarray)) and x.ndim > 0


def samples_in(batch: Any) -> int:
    """Samples of a batch: the first dim of its first array; 0 if there is none."""
    return next((x.shape[0] for x in _leaves(batch) if _is_array(x)), 0)


def _digest_of(batch: Any) -> int:
    return digest(b"".join(_bytes(x) for x in _leaves(batch) if _is_array(x)))


def _bytes(x: Any) -> bytes:
    if isinstance(x, Tensor):
        x = x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(x).tobytes()


def cut(batch: Any, count: int, low: int, high: int) -> Any:
    """Samples [low, high) of a batch of `count`: every array with as many rows is cut, and so is a list of as many
    plain values; the rest stays whole."""
    if _is_array(batch):
        return batch[low:high] if batch.shape[0] == count else batch
    if isinstance(batch, Mapping):
        kept = {key: cut(value, count, low, high) for key, value in batch.items()}
        return kept if type(batch) is dict else _like(batch, kept)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(cut(x, count, low, high) for x in batch))
    if isinstance(batch, (list, tuple)):
        if len(batch) == count and not any(
            _is_array(x) or isinstance(x, (list, tuple, Mapping)) for x in batch
        ):
            return batch[low:high]
        return type(batch)(cut(x, count, low, high) for x in batch)
    return batch


def _like(batch: Mapping[Any, Any], kept: dict[Any, Any]) -> Any:
    try:
        return type(batch)(kept)  # type: ignore[call-arg]
    except TypeError:
        return kept
