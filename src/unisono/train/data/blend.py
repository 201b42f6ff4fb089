"""Several sources in one sequence, each with its share.

Of every 1000 samples each source has the same number, in an order that the seed and the thousand decide. The samples of
one source come in its own order: each once before any comes again. All of it is a function of the position.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unisono.train.data.dataset import Dataset, Foreseen, Uneven, fetched, numbers_at
from unisono.train.data.order import samples_at

BLOCK = 1000
_APART = 0x626C656E64  # "blend": keeps the seeds of the sources and of their order apart


def shared_out(weights: Sequence[float]) -> list[int]:
    """How many of every 1000 samples each source has: its share, rounded, by largest remainder; at least one."""
    total = sum(weights)
    exact = [BLOCK * weight / total for weight in weights]
    counts = [max(1, int(share)) for share in exact]
    for i in sorted(range(len(counts)), key=lambda i: int(exact[i]) - exact[i]):
        counts[i] += sum(counts) < BLOCK
    while sum(counts) > BLOCK:  # those that were given their one
        counts[counts.index(max(counts))] -= 1
    return counts


def _seed_of(seed: int, part: int) -> int:
    """The seed of a part's order."""
    return seed ^ (_APART + (part + 1 << 40))


@dataclass(frozen=True, slots=True)
class Blend:
    """Samples of several datasets, numbered one behind the other. counts: of every 1000 positions, see `shared_out`."""

    parts: Sequence[Dataset]
    counts: Sequence[int]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def numbers_at(self, seed: int, positions: np.ndarray) -> np.ndarray:
        """The samples at these positions, int64 [n]."""
        owner, within = self._placed(seed, positions)
        numbers = np.zeros(len(positions), dtype=np.int64)
        for i, (part, count) in enumerate(zip(self.parts, self.counts, strict=True)):
            mine = owner == i
            nth = positions[mine] // BLOCK * count + within[mine]
            numbers[mine] = self._first(i) + numbers_at(part, _seed_of(seed, i), nth)
        return numbers

    @property
    def is_slow(self) -> bool:
        """Whether one of the parts is."""
        return any(isinstance(part, Foreseen) and part.is_slow for part in self.parts)

    def expect(self, seed: int, position: int) -> None:
        """Begin to read what the parts give from this position on."""
        for i, (part, count) in enumerate(zip(self.parts, self.counts, strict=True)):
            if isinstance(part, Foreseen):
                part.expect(_seed_of(seed, i), position // BLOCK * count)

    def _first(self, part: int) -> int:
        return sum(map(len, self.parts[:part]))

    def _placed(self, seed: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(the source of each position, how many of its samples come before it in the thousand)."""
        blocks, where = np.unique(positions // BLOCK, return_inverse=True)
        every = (blocks[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
        slots = samples_at(seed ^ _APART, every, BLOCK).reshape(-1, BLOCK)
        owners = np.searchsorted(np.cumsum(self.counts), slots, side="right")
        before = np.zeros_like(owners)
        for i in range(len(self.parts)):
            mine = owners == i
            before[mine] = (np.cumsum(mine, 1) - 1)[mine]
        at = where, positions % BLOCK
        return owners[at], before[at]

    def shares(self, seed: int, count: int) -> list[int]:
        """How many of the first `count` samples come from each source."""
        whole, rest = divmod(count, BLOCK)
        owner, _ = self._placed(seed, np.arange(whole * BLOCK, whole * BLOCK + rest, dtype=np.int64))
        return [whole * n + int((owner == i).sum()) for i, n in enumerate(self.counts)]

    def _by_part(self, indices: np.ndarray) -> Iterator[tuple[Dataset, np.ndarray, np.ndarray]]:
        """(part, which of the indices are its own, their numbers in it) of each part that has some."""
        for i, part in enumerate(self.parts):
            local = indices - self._first(i)
            rows = np.flatnonzero((local >= 0) & (local < len(part)))
            if len(rows):
                yield part, rows, local[rows]

    def fetch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """inputs, targets, as the parts'."""
        return _joined((rows, *part.fetch(local)) for part, rows, local in self._by_part(indices))

    def fetch_at(self, seed: int, positions: np.ndarray, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """As `fetch`: a visit is known by its position in the mixture."""
        return _joined(
            (rows, *fetched(part, seed, positions[rows], local))
            for part, rows, local in self._by_part(indices)
        )

    def counted(self, indices: np.ndarray) -> np.ndarray | None:
        """int64 [n], targets of each that count; None where all do."""
        if not any(isinstance(part, Uneven) for part in self.parts):
            return None
        counts = np.full(len(indices), self.fetch(indices[:1])[1][0].numel(), dtype=np.int64)
        for part, rows, local in self._by_part(indices):
            part_counts = part.counted(local) if isinstance(part, Uneven) else None
            counts[rows] = counts[rows] if part_counts is None else part_counts
        return counts

    def documents(self, indices: np.ndarray) -> Tensor | None:
        """int64 [n, T]; a window of a part that says nothing is one document. None where no part packs."""
        first = np.zeros(1, dtype=np.int64)
        if not any(isinstance(part, Uneven) and part.documents(first) is not None for part in self.parts):
            return None
        ids = torch.zeros_like(self.fetch(indices)[0])
        for part, rows, local in self._by_part(indices):
            documents = part.documents(local) if isinstance(part, Uneven) else None
            if documents is not None:
                ids[torch.from_numpy(rows)] = documents
        return ids


def _joined(parts: Iterable[tuple[np.ndarray, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(inputs, targets) of parts with their rows, in the order of rows."""
    rows, inputs, targets = zip(*parts, strict=True)
    back = torch.from_numpy(np.argsort(np.concatenate(rows)))
    return torch.cat(inputs)[back], torch.cat(targets)[back]
