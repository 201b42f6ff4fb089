"""How late each rank was in each step, for a picture of any size: a matrix with coarser ones above it."""

import statistics
import struct
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from unisono.report.calls import RankStep, StepCalls, rank_step
from unisono.report.collect import Record
from unisono.report.verdict.evidence import BUSY
from unisono.spec.words import is_number

Seen = RankStep | float
FACTOR = 8
"""Steps of a column of one level that are one column of the next; of each the largest lateness is kept."""
LEVELS = 4
NONE = 255
"""In a tile: nothing is known of this cell."""
TILE = struct.Struct("<4sIIIIIIff")
_LEAST = 0.02  # seconds of the darkest colour at least: ranks are always some microseconds apart


class LatenessMap:
    """Seconds of lateness by rank and step; NaN where nothing is known. steps: the number of the last one. places: of
    the ranks in the mesh. by_calls: whether it is that of `StepCalls.lateness`; of lines without calls it is the
    seconds of work beside the median rank's, which tell nothing of a rank that is slow inside a collective.
    """

    def __init__(self) -> None:
        self.ranks = self.steps = 0
        self.by_calls, self.version = False, 0
        self.places: dict[int, Mapping[str, int]] = {}
        self._levels = [np.full((0, 0), np.nan, np.float32) for _ in range(LEVELS)]
        self._waiting: dict[int, dict[int, Seen]] = {}

    def put(self, rank: int, lines: Iterable[Record]) -> None:
        """Take in lines of steps of one rank."""
        for line in lines:
            step, seen = line["step"], seen_in(rank, line)
            if seen is not None and step >= 0:
                self.by_calls = self.by_calls or isinstance(seen, RankStep)
                self._waiting.setdefault(step, {})[rank] = seen
                self.ranks, self.steps = max(self.ranks, rank + 1), max(self.steps, step)

    def settle(self, until: int) -> None:
        """Work out the steps of which all ranks have come, and those up to `until`, whoever has."""
        due = [step for step, seen in self._waiting.items() if len(seen) >= self.ranks or step <= until]
        self.place({step: self._waiting.pop(step) for step in due})

    def place(self, steps: Mapping[int, Mapping[int, Seen]]) -> None:
        """Put down the lateness in steps. steps: of each rank what `seen_in` says."""
        if not steps:
            return
        self._grow()
        base = self._levels[0]
        for step, seen in steps.items():
            late = lateness(step, seen, self.places)
            base[list(late), step] = list(late.values())
        self._raise(sorted(steps))
        self.version += 1

    def unread(self, first: int, last: int) -> list[int]:
        """Steps of a stretch of which nothing is known."""
        part = self.window(first, last)
        return [first + int(at) for at in np.flatnonzero(np.isnan(part).all(axis=0))] if part.size else []

    def forget_after(self, step: int) -> None:
        """Steps that are made again are not known any more."""
        self.steps = min(self.steps, step)
        self._levels[0][:, step + 1 :] = np.nan
        self._raise(range(step + 1, self._levels[0].shape[1]))

    def window(self, first: int, last: int) -> np.ndarray:
        """The matrix of some steps, ranks x steps."""
        return self._levels[0][: self.ranks, first : last + 1]

    def cost(self, first: int, last: int) -> np.ndarray:
        """Seconds, for each rank, that it was late in a stretch of steps; those of being early do not count."""
        level = min(LEVELS - 1, max(0, _level(last - first + 1, 256)))
        size = FACTOR**level
        part = self._levels[level][: self.ranks, first // size : last // size + 1]
        return np.nansum(np.maximum(part, 0.0), axis=1) if part.size else np.zeros(self.ranks)

    def order(self, first: int, last: int, by_cost: bool) -> np.ndarray:
        """The ranks from top to bottom, by number or the latest first."""
        if not by_cost:
            return np.arange(self.ranks)
        return np.argsort(-self.cost(first, last), kind="stable")

    def tile(
        self, rows: tuple[int, int], steps: tuple[int, int], width: int, height: int, by_cost: bool = False
    ) -> bytes:
        """A picture of rows and steps (first, last) in at most so many pixels: `TILE`, then the ranks of the rows as
        uint16, then a byte a cell. 0 is a rank in time, 254 one late by the `scale` seconds of the head."""
        last_row = max(0, self.ranks - 1)
        top, bottom = (min(max(0, row), last_row) for row in rows)
        first, last = (min(max(0, step), max(self.steps, 0)) for step in steps)
        order = self.order(first, last, by_cost)[top : bottom + 1]
        level = min(LEVELS - 1, max(0, _level(last - first + 1, width)))
        size = FACTOR**level
        part = self._levels[level][order, first // size : last // size + 1]
        cells = _shrunk(_shrunk(part, width, 1), height, 0)
        known = cells[np.isfinite(cells)]
        scale = max(float(known.max()) if known.size else 0.0, _LEAST)
        mean = float(np.maximum(known, 0).mean()) if known.size else 0.0
        with np.errstate(invalid="ignore"):
            shade = np.sqrt(np.clip(cells / scale, 0.0, 1.0)) * 254
        pixels = np.where(np.isfinite(cells), np.nan_to_num(shade), NONE).astype(np.uint8)
        head = TILE.pack(
            b"late", pixels.shape[0], pixels.shape[1], top, bottom, first // size * size, last, scale, mean
        )
        return head + order.astype(np.uint16).tobytes() + pixels.tobytes()

    def _grow(self) -> None:
        """Room for all ranks and steps, twice what was there."""
        rows, columns = self._levels[0].shape
        if rows >= self.ranks and columns > self.steps:
            return
        wide = columns if columns > self.steps else max(FACTOR ** (LEVELS - 1), 2 * columns, self.steps + 1)
        wide = -(-wide // FACTOR ** (LEVELS - 1)) * FACTOR ** (LEVELS - 1)
        for at, old in enumerate(self._levels):
            new = np.full((max(rows, self.ranks), wide // FACTOR**at), np.nan, np.float32)
            new[: old.shape[0], : old.shape[1]] = old
            self._levels[at] = new

    def _raise(self, steps: Sequence[int]) -> None:
        """Bring changed steps up into the coarser levels."""
        for at in range(1, LEVELS):
            columns = sorted({step // FACTOR**at for step in steps})
            if not columns:
                return
            below = self._levels[at - 1]
            rows = below.shape[0]
            if columns[-1] - columns[0] + 1 == len(columns):
                part = below[:, columns[0] * FACTOR : (columns[-1] + 1) * FACTOR]
                self._levels[at][:, columns[0] : columns[-1] + 1] = _largest(
                    part.reshape(rows, len(columns), FACTOR)
                )
                continue
            for column in columns:
                part = below[:, column * FACTOR : (column + 1) * FACTOR]
                self._levels[at][:, column] = _largest(part[:, None, :])[:, 0]


def lateness(
    step: int, seen: Mapping[int, Seen], places: Mapping[int, Mapping[str, int]]
) -> Mapping[int, float]:
    """Seconds by which each rank came later than the median one. seen: of each rank what `seen_in` says."""
    met = {rank: value for rank, value in seen.items() if isinstance(value, RankStep)}
    if met:
        return StepCalls(step, met, places).lateness
    middle = statistics.median(value for value in seen.values() if not isinstance(value, RankStep))
    return {rank: value - middle for rank, value in seen.items() if not isinstance(value, RankStep)}


def seen_in(rank: int, line: Record) -> Seen | None:
    """A rank's step with its calls; seconds of work where its line has none; None where it has no times either."""
    if line.get("calls") and (step := rank_step(rank, line)) is not None:
        return step
    time = line.get("time")
    return sum(time[part] for part in BUSY if is_number(time.get(part))) if isinstance(time, dict) else None


def _level(columns: int, width: int) -> int:
    level = 0
    while level + 1 < LEVELS and columns >= width * FACTOR ** (level + 1):
        level += 1
    return level


def _largest(part: np.ndarray) -> np.ndarray:
    """The largest of the last axis; NaN only where all are."""
    return np.fmax.reduce(part, axis=-1)


def _shrunk(part: np.ndarray, size: int, axis: int) -> np.ndarray:
    """At most `size` rows or columns, each the largest of its stretch."""
    count = part.shape[axis]
    if count <= size or not part.size:
        return part
    return np.fmax.reduceat(part, np.arange(size) * count // size, axis=axis)
