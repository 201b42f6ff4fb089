"""The order of samples that lie in parts: parts in an order drawn anew for each epoch, and samples mixed among a fixed
number of neighbouring parts.

Whoever reads the order from any position on needs a few parts at a time, so a cache is bounded. It is a function of
seed, epoch and the sizes of the parts. Ranks, workers and settings of a cache do not enter. The state is a position.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from unisono.train.data.order import samples_at

WINDOW = 32  # parts among which samples are mixed; fixed, for the order follows from it
_PARTS, _WITHIN = 0x7061727473, 0x77697468696E  # "parts", "within": keep the two draws of a seed apart


@dataclass(frozen=True, slots=True)
class Epoch:
    """One pass. parts: their numbers, in order. ends: int64 [parts + 1], samples before each of them. windows: int64
    [windows + 1], samples before each window."""

    parts: np.ndarray
    ends: np.ndarray
    windows: np.ndarray


@dataclass(frozen=True, slots=True)
class PartOrder:
    """first: int64 [parts + 1], the number of the first sample of each part, and how many there are."""

    first: np.ndarray
    _drawn: dict[tuple[int, int], Epoch] = field(default_factory=dict, compare=False)

    def __len__(self) -> int:
        return int(self.first[-1])

    def epoch(self, seed: int, number: int) -> Epoch:
        """The order of parts in an epoch; the last few are kept."""
        known = self._drawn.get((seed, number))
        if known is None:
            count = len(self.first) - 1
            line = np.arange(number * count, (number + 1) * count, dtype=np.int64)
            parts = samples_at(seed ^ _PARTS, line, count)
            ends = np.concatenate(([0], np.cumsum(np.diff(self.first)[parts])))
            windows = np.unique(
                np.concatenate((ends[:-1:WINDOW], ends[-1:]))
            )  # those without samples are none
            while len(self._drawn) > 2:
                self._drawn.pop(next(iter(self._drawn)), None)
            known = self._drawn[seed, number] = Epoch(parts, ends, windows)
        return known

    def numbers_at(self, seed: int, positions: np.ndarray) -> np.ndarray:
        """The samples at these positions of the endless sequence that the seed makes, int64 [n]. Raises ValueError
        where there is no sample."""
        if not len(self):
            raise ValueError("a dataset of 0 samples has no order")
        numbers = np.empty(len(positions), dtype=np.int64)
        epochs, places = np.divmod(positions, len(self))
        for number in np.unique(epochs).tolist():
            epoch, mine = self.epoch(seed, number), np.flatnonzero(epochs == number)
            window = np.searchsorted(epoch.windows, places[mine], side="right") - 1
            for at in np.unique(window).tolist():
                rows = mine[window == at]
                first, end = int(epoch.windows[at]), int(epoch.windows[at + 1])
                draw = (number * len(self.first) + at) * (end - first)
                mixed = first + samples_at(seed ^ _WITHIN, draw + places[rows] - first, end - first)
                slot = np.searchsorted(epoch.ends, mixed, side="right") - 1
                numbers[rows] = self.first[epoch.parts[slot]] + mixed - epoch.ends[slot]
        return numbers

    def parts_from(self, seed: int, position: int) -> Sequence[int]:
        """The parts of the window that a position lies in, and of the one after it, which may be of the next epoch."""
        number, place = divmod(position, len(self))
        epoch = self.epoch(seed, number)
        at = int(np.searchsorted(epoch.windows, place, side="right")) - 1
        chosen = [*_of_window(epoch, at)]
        if at + 2 < len(epoch.windows):
            return [*chosen, *_of_window(epoch, at + 1)]
        return [*chosen, *_of_window(self.epoch(seed, number + 1), 0)]

    def part_of(self, numbers: np.ndarray) -> np.ndarray:
        """The part that each sample lies in, int64 [n]."""
        return np.searchsorted(self.first, numbers, side="right") - 1


def _of_window(epoch: Epoch, at: int) -> list[int]:
    """Parts of a window that hold samples."""
    a, b = np.searchsorted(epoch.ends, epoch.windows[at : at + 2], side="left").tolist()
    held = np.flatnonzero(np.diff(epoch.ends[a : b + 1])) + a
    return epoch.parts[held].tolist()
