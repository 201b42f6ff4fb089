"""Data sets over shards: windows of a stream of tokens, windows of documents, pictures."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from unisono.train.data.packing import PackedWindows
from unisono_contrib.train.data.stream.crew import EncodedPicture, PictureDecoder
from unisono_contrib.train.data.stream.decode import Draw
from unisono_contrib.train.data.stream.index import Index
from unisono_contrib.train.data.stream.order import PartOrder
from unisono_contrib.train.data.stream.parts import PartReader
from unisono_contrib.train.data.stream.reading import TokenPart

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ShardDataset(ABC, Generic[T]):
    """Samples that lie in parts. order: of the samples, see `PartOrder`. parts: opens them."""

    order: PartOrder
    parts: PartReader[T]

    is_slow = True  # worth a thread that reads a step ahead

    def __len__(self) -> int:
        return len(self.order)

    def numbers_at(self, seed: int, positions: np.ndarray) -> np.ndarray:
        """The samples at these positions, int64 [n]."""
        return self.order.numbers_at(seed, positions)

    def expect(self, seed: int, position: int) -> None:
        """Begin to read what lies from this position on."""
        if len(self):
            self.parts.expect(self.order.parts_from(seed, position))

    def _by_part(self, indices: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(part, which of the indices lie in it, their numbers in it)."""
        owners = self.order.part_of(indices)
        for part in np.unique(owners).tolist():
            rows = np.flatnonzero(owners == part)
            yield part, rows, indices[rows] - self.order.first[part]

    @abstractmethod
    def fetch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of the samples with these numbers."""


@dataclass(frozen=True, slots=True)
class TokenStream(ShardDataset[TokenPart]):
    """Windows over the tokens of all shards as one line, as `TokenWindows` cuts them.

    begins: int64 [parts + 1], the first token of each part in the line. start: the first token of the first window.
    heads: the first tokens of each part, for windows that begin in the part before: window + 1, or all that it has.
    """

    begins: np.ndarray
    start: int
    window: int
    heads: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, index: Index, parts: PartReader[TokenPart], tokens: range, window: int) -> "TokenStream":
        """Windows over the tokens with these numbers."""
        begins = np.concatenate(([0], np.cumsum(index.counts)))
        count = max(0, len(tokens) - 1) // window
        first = np.clip(-((tokens.start - begins) // window), 0, count)
        first[-1] = count
        sizes = np.minimum(index.counts, window + 1)
        heads = tuple(np.split(index.heads, np.cumsum(sizes)[:-1]))
        return cls(PartOrder(first), parts, begins, tokens.start, window, heads)

    def fetch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """inputs, targets: int64 [n, window]."""
        rows = np.empty((len(indices), self.window + 1), dtype=np.int64)
        for part, where, within in self._by_part(indices):
            tokens = self.parts.get(part).tokens
            starts = self.start + (within + self.order.first[part]) * self.window - self.begins[part]
            for row, at in zip(where.tolist(), starts.tolist(), strict=True):
                piece = tokens[at : at + self.window + 1]
                rows[row, : len(piece)] = piece
                if len(piece) <= self.window:
                    rows[row, len(piece) :] = self._after(part, self.window + 1 - len(piece))
        return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())

    def _after(self, part: int, count: int) -> np.ndarray:
        """The first tokens behind a part."""
        pieces, held = [], 0
        while held < count:
            part += 1
            pieces.append(self.heads[part])
            held += len(pieces[-1])
        return np.concatenate(pieces)[:count]


@dataclass(frozen=True, slots=True)
class DocumentStream(ShardDataset[PackedWindows]):
    """Windows of whole documents, packed within each part. sums: int64, targets of each window that count. offset: the
    first window in the numbering of its parts' windows, for what is held out; several: see `PackedWindows`."""

    begins: np.ndarray
    sums: np.ndarray
    offset: int
    several: bool

    @classmethod
    def of(
        cls, index: Index, parts: PartReader[PackedWindows], windows: range, several: bool
    ) -> "DocumentStream":
        """The windows with these numbers."""
        begins = np.concatenate(([0], np.cumsum(index.windows)))
        first = np.clip(begins - windows.start, 0, len(windows))
        sums = index.sums[windows.start : windows.stop]
        return cls(PartOrder(first), parts, begins, sums, windows.start, several)

    def _windows(self, indices: np.ndarray) -> Iterator[tuple[np.ndarray, PackedWindows, np.ndarray]]:
        for part, rows, within in self._by_part(indices):
            shift = self.order.first[part] + self.offset - self.begins[part]
            yield rows, self.parts.get(part), within + shift

    def fetch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """As `PackedWindows.fetch`."""
        read = [(rows, *windows.fetch(within)) for rows, windows, within in self._windows(indices)]
        back = torch.from_numpy(np.argsort(np.concatenate([rows for rows, _, _ in read])))
        return torch.cat([x for _, x, _ in read])[back], torch.cat([y for _, _, y in read])[back]

    def counted(self, indices: np.ndarray) -> np.ndarray:
        """int64 [n], targets of these windows that count."""
        return self.sums[indices]

    def documents(self, indices: np.ndarray) -> Tensor | None:
        """As `PackedWindows.documents`."""
        if not self.several:
            return None
        read = [(rows, windows.documents(within)) for rows, windows, within in self._windows(indices)]
        back = torch.from_numpy(np.argsort(np.concatenate([rows for rows, _ in read])))
        return torch.cat([ids for _, ids in read if ids is not None])[back]


Body = Callable[[int, int], bytes]  # first byte, byte behind → bytes of a part


@dataclass(frozen=True, slots=True)
class PictureStream(ShardDataset[Body]):
    """EncodedPicture pictures, decoded when they are read, in the size that the model has.

    index: where they lie. offset: the first of them in the index. decoder: how. varies: whether the user's function may
    draw; in a validation it may not.
    """

    index: Index
    offset: int
    decoder: PictureDecoder
    varies: bool

    @classmethod
    def of(
        cls, index: Index, parts: PartReader[Body], samples: range, decoder: PictureDecoder, varies: bool
    ) -> "PictureStream":
        """The pictures with these numbers."""
        begins = np.concatenate(([0], np.cumsum(index.counts)))
        first = np.clip(begins - samples.start, 0, len(samples))
        return cls(PartOrder(first), parts, index, samples.start, decoder, varies)

    def fetch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """inputs float32 [n, C, H, W] in 0..1 or as the user's function made them, targets int64 [n]. Raises UsageError
        D14 for a picture that cannot be decoded, named by shard and byte, D16, and UserCodeError."""
        return self._fetched(indices, [None] * len(indices))

    def fetch_at(self, seed: int, positions: np.ndarray, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """As `fetch`. The user's function draws anew at each position."""
        draws = [(seed, at) for at in positions.tolist()] if self.varies else [None] * len(indices)
        return self._fetched(indices, draws)

    def _fetched(self, indices: np.ndarray, draws: Sequence[Draw | None]) -> tuple[Tensor, Tensor]:
        encoded: dict[int, EncodedPicture] = {}
        for part, rows, _ in self._by_part(indices):
            body, about = self.parts.get(part), self.index.part(part)
            for row in rows.tolist():
                first, end = self.index.spans[int(indices[row]) + self.offset].tolist()
                encoded[row] = EncodedPicture(
                    about.path, about.start + first, partial(body, first, end), draws[row]
                )
        pixels = self.decoder.decoded([encoded[row] for row in range(len(indices))])
        if pixels.dtype == np.uint8:
            pixels = pixels.astype(np.float32)
            pixels /= (
                255.0  # by NumPy: torch would start its threads for the one that reads ahead, and they spin
            )
        return torch.from_numpy(pixels), torch.from_numpy(self.index.labels[indices + self.offset])
