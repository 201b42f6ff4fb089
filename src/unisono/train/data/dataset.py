"""What a data source becomes: numbered samples, and what is known about them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from unisono.spec.errors import UsageError
from unisono.train.data.order import samples_at


class Dataset(Protocol):
    """Numbered samples, the same in every process."""

    def __len__(self) -> int: ...

    def fetch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of the samples with these numbers, first dim as long as `indices`. A target of -100 does
        not count."""
        ...


@runtime_checkable
class Uneven(Dataset, Protocol):
    """Samples of which not all targets count, or that hold several documents each."""

    def counted(self, indices: np.ndarray) -> np.ndarray | None:
        """int64, how many targets of each of these samples count; None where all do."""
        ...

    def documents(self, indices: np.ndarray) -> Tensor | None:
        """int64 [n, T], which document each position belongs to; None where a sample is one."""
        ...


@runtime_checkable
class Ordered(Dataset, Protocol):
    """Samples with an order of their own."""

    def numbers_at(self, seed: int, positions: np.ndarray) -> np.ndarray:
        """The numbers of the samples at these positions of the endless sequence that the seed makes, int64 [n]."""
        ...


@runtime_checkable
class Foreseen(Ordered, Protocol):
    """Samples that take long to read, and can be read before they are asked for.

    is_slow: whether a thread shall read a step ahead.
    """

    @property
    def is_slow(self) -> bool: ...

    def expect(self, seed: int, position: int) -> None:
        """Begin to read the samples from this position on. Returns at once."""
        ...


@runtime_checkable
class Visited(Dataset, Protocol):
    """Samples that may differ from one visit to the next, such as augmented pictures. A visit is known by its position
    in the sequence that the seed makes."""

    def fetch_at(self, seed: int, positions: np.ndarray, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """As `fetch`, of the samples with these numbers, which stand at these positions."""
        ...


def fetched(dataset: Dataset, seed: int, positions: np.ndarray, indices: np.ndarray) -> tuple[Tensor, Tensor]:
    """(inputs, targets) of the samples that stand at these positions."""
    if isinstance(dataset, Visited):
        return dataset.fetch_at(seed, positions, indices)
    return dataset.fetch(indices)


def numbers_at(dataset: Dataset, seed: int, positions: np.ndarray) -> np.ndarray:
    """The numbers of the samples at these positions of the sequence that the seed makes, int64 [n]."""
    if isinstance(dataset, Ordered):
        return dataset.numbers_at(seed, positions)
    return samples_at(seed, positions, len(dataset))


@dataclass(frozen=True, slots=True)
class Thinned:
    """Every few samples of a dataset: `count` of them."""

    inner: Dataset
    count: int

    def __len__(self) -> int:
        return self.count

    def _numbers(self, indices: np.ndarray) -> np.ndarray:
        return indices * (len(self.inner) // self.count)

    def fetch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """As the dataset's."""
        return self.inner.fetch(self._numbers(indices))

    def counted(self, indices: np.ndarray) -> np.ndarray | None:
        """As the dataset's."""
        return self.inner.counted(self._numbers(indices)) if isinstance(self.inner, Uneven) else None

    def documents(self, indices: np.ndarray) -> Tensor | None:
        """As the dataset's."""
        return self.inner.documents(self._numbers(indices)) if isinstance(self.inner, Uneven) else None


@dataclass(frozen=True, slots=True)
class TokenWindows:
    """Non-overlapping windows over one long line of tokens; a window's targets are its inputs, one further.

    tokens: [n] of any integer type, possibly memory-mapped. context: tokens in a window.
    vocab: where tokens come from a file that we did not write, the size that they must stay under.
    origin, first: for messages: the file, and where in it this line begins.
    """

    tokens: np.ndarray
    context: int
    vocab: int | None = None
    origin: str = ""
    first: int = 0

    def __len__(self) -> int:
        return max(len(self.tokens) - 1, 0) // self.context

    def fetch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """inputs, targets: int64 [n, context]. Raises UsageError where a token is outside the vocabulary."""
        span = len(self) * self.context
        inputs = self.tokens[:span].reshape(-1, self.context)[indices]
        targets = self.tokens[1 : span + 1].reshape(-1, self.context)[indices]
        if self.vocab is not None:
            self._guard(inputs, indices, 0)
            self._guard(targets, indices, 1)
        return torch.from_numpy(inputs.astype(np.int64)), torch.from_numpy(targets.astype(np.int64))

    def _guard(self, rows: np.ndarray, indices: np.ndarray, shift: int) -> None:
        limit = self.vocab
        if limit is None or rows.size == 0:
            return
        if rows.max() < limit and rows.min() >= 0:
            return
        row, column = np.argwhere((rows >= limit) | (rows < 0))[0]
        position = self.first + int(indices[row]) * self.context + int(column) + shift
        raise token_out_of_range(int(rows[row, column]), position, limit, self.origin)


@dataclass(frozen=True, slots=True)
class Images:
    """Labelled images in memory. inputs: float32 [n, C, H, W] in 0..1; targets: int64 [n]."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def fetch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """inputs float32 [n, C, H, W], targets int64 [n]."""
        chosen = torch.from_numpy(indices)
        return self.inputs[chosen], self.targets[chosen]


@dataclass(frozen=True, slots=True)
class Corpus:
    """A source, split and numbered.

    vocab: number of different tokens; None for images. classes: what a target may be (text: vocab).
    sample_shape: of one input: (context,) or (C, H, W).
    rows: of each table that the indices of a sample point into. notes: what its reader is to know, a sentence each.
    shares(seed, n): of the first n samples of training, how many are of which source; None where there is one.
    decode, encode: tokens to text and back, where there is text. fingerprint: 16 hex digits of the data.
    """

    train: Dataset
    val: Dataset
    vocab: int | None
    classes: int
    sample_shape: tuple[int, ...]
    decode: Callable[[Sequence[int]], str] | None
    encode: Callable[[str], list[int]] | None
    fingerprint: str
    origin: str = ""
    rows: tuple[int, ...] | None = None
    notes: tuple[str, ...] = ()
    shares: Callable[[int, int], dict[str, int]] | None = None


def require_samples(have: int, need: int, origin: str, fix: str = "") -> None:
    """Raises UsageError D05 where the data has fewer samples than one step needs."""
    if have < need:
        raise UsageError(
            f"the data has {have:,} training samples, one step needs {need:,}",
            code="D05",
            where=origin,
            likely="the file is too small for this context and global batch",
            fix=fix or "a smaller train.global_batch or model.context, or more data",
        )


def token_out_of_range(token: int, position: int, vocab: int, origin: str) -> UsageError:
    """The error for a token that the model has no row for."""
    return UsageError(
        f"token {token} at position {position:,} is outside the vocabulary of {vocab:,}",
        code="D09",
        where=origin,
        likely="model.vocab is not the tokenizer's, or the file holds another integer type",
        fix=f"model.vocab of at least {token + 1}" if token >= 0 else "check how the file was written",
    )
