"""A made-up log of clicks: what a recommender learns from, where there is no real one.

Sample i is a function of the seed and i alone. Its numbers are normal. Its indices follow a power law: of N rows, row k
is as likely as log((k + 2) / (k + 1)) / log(N + 1), so few rows are read often and most of them rarely. Whether it was
clicked is drawn from a logistic model that nobody is told: of the numbers, of a weight for each row of each table, and
of the product of the weights of the first two tables, which a linear model cannot learn.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unisono.train.data.order import mix

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROW, _NUMBER, _CLICK, _WEIGHT, _ROW_WEIGHT = range(5)  # what is drawn
SCALE, CROSSED, OFFSET = 2.0, 2.0, -0.5  # of the hidden model


@dataclass(frozen=True, slots=True)
class Clicks:
    """Samples first .. first + count - 1 of an endless log. dense: numbers of a sample. rows: of each table. lookups:
    indices into each table."""

    seed: int
    first: int
    count: int
    dense: int
    rows: Sequence[int]
    lookups: int

    def __len__(self) -> int:
        return self.count

    def fetch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """inputs int64 [n, dense + tables · lookups], the bits of float64 and then indices; targets int64 [n], 1 for
        a click."""
        at = indices.astype(np.uint64) + np.uint64(self.first)
        numbers = self._normal(_NUMBER, at, self.dense)
        chosen = self._chosen(at)
        logit = self.logits(numbers, chosen)
        clicked = self._uniform(_CLICK, at, 1)[:, 0] * (1.0 + np.exp(-logit)) < 1.0
        inputs = np.concatenate((numbers.view(np.int64), chosen), 1)
        return torch.from_numpy(inputs), torch.from_numpy(clicked.astype(np.int64))

    def logits(self, numbers: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """Of the hidden model: [n, dense], [n, tables · lookups] → [n]."""
        weights = self._normal(_WEIGHT, np.zeros(1, dtype=np.uint64), self.dense)[0]
        scores = numbers @ weights / np.sqrt(max(1, self.dense))
        effects = np.stack(
            [
                self._normal(_ROW_WEIGHT, chosen[:, column].astype(np.uint64), 1, column // self.lookups)[:, 0]
                for column in range(chosen.shape[1])
            ],
            1,
        ).reshape(len(chosen), -1, self.lookups).sum(2) / np.sqrt(self.lookups)  # fmt: skip
        pair = effects[:, 0] * effects[:, min(1, effects.shape[1] - 1)]
        return SCALE * (scores + effects.mean(1)) + CROSSED * pair + OFFSET

    def _chosen(self, at: np.ndarray) -> np.ndarray:
        """int64 [n, tables · lookups]."""
        count = np.repeat(np.array(self.rows, dtype=np.int64), self.lookups)
        drawn = (count + 1.0) ** self._uniform(_ROW, at, len(count))
        return np.minimum(drawn.astype(np.int64) - 1, count - 1)

    def _uniform(self, what: int, at: np.ndarray, columns: int, more: int = 0) -> np.ndarray:
        """Numbers in (0, 1), float64 [len(at), columns]."""
        start = np.array([(self.seed << 24) ^ (what << 16) ^ more], dtype=np.uint64)
        keys = mix(mix(start + _GOLDEN) + at * _GOLDEN)
        bits = mix(keys[:, None] + np.arange(1, columns + 1, dtype=np.uint64)[None, :] * _GOLDEN)
        return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53

    def _normal(self, what: int, at: np.ndarray, columns: int, more: int = 0) -> np.ndarray:
        """Of mean 0 and variance 1 (Box & Muller, 1958), float64 [len(at), columns]."""
        pairs = self._uniform(what, at, 2 * columns, more)
        radius = np.sqrt(-2.0 * np.log(pairs[:, :columns]))
        return np.ascontiguousarray(radius * np.cos(2.0 * np.pi * pairs[:, columns:]))
