"""The values that a sweep may give to keys of a recipe.

"train.lr" = {low = 1e-4, high = 1e-1, log = true}     any number between, by its logarithm
"model.n_layer" = {low = 2, high = 8}                   any whole number between: both bounds are whole
"train.optimizer" = ["adamw", "sgd"]                    one of a list
"""

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_FACTORS = (0.8, 1.25)
"""By which an explored number is multiplied (Jaderberg et al., 2017, take 0.8 and 1.2); these two undo each other."""

Params = Mapping[str, Any]
"""Values of a trial by the recipe's dotted keys."""


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of a list, in no order that would mean anything."""

    values: tuple[Any, ...]

    def at(self, share: float) -> Any:
        """The value at a share (0 to 1) of the list."""
        return self.values[min(len(self.values) - 1, int(share * len(self.values)))]

    def cells(self) -> tuple[Any, ...]:
        """All values, for a grid."""
        return self.values

    def near(self, value: Any, rng: random.Random) -> Any:
        """The value or a neighbour of it in the list."""
        at = self.values.index(value) + rng.choice((-1, 0, 1))
        return self.values[max(0, min(len(self.values) - 1, at))]


@dataclass(frozen=True, slots=True)
class Interval:
    """Numbers from `low` to `high`, both included. log: equal ratios are equally likely. whole: whole numbers alone.
    points: how many a grid takes; 0: it takes none."""

    low: float
    high: float
    log: bool = False
    whole: bool = False
    points: int = 0

    def at(self, share: float) -> float | int:
        """The value at a share (0 to 1) of the way from `low` to `high`."""
        if self.whole and not self.log:
            return min(int(self.high), int(self.low) + int(share * (self.high - self.low + 1)))
        return self._held(
            self.low * (self.high / self.low) ** share
            if self.log
            else self.low + share * (self.high - self.low)
        )

    def cells(self) -> tuple[float | int, ...]:
        """`points` values at equal distances, without repetition."""
        last = max(1, self.points - 1)
        spread = (
            self.low * (self.high / self.low) ** (i / last)
            if self.log
            else self.low + i / last * (self.high - self.low)
            for i in range(self.points)
        )
        return tuple(dict.fromkeys(map(self._held, spread)))

    def near(self, value: float, rng: random.Random) -> float | int:
        """The value times one of two factors; a whole number changes by one at least."""
        factor = rng.choice(_FACTORS)
        moved = value * factor
        if self.whole and round(moved) == value:
            moved = value + math.copysign(1, factor - 1)
        return self._held(moved)

    def _held(self, value: float) -> float | int:
        value = min(self.high, max(self.low, value))
        return round(value) if self.whole else value


Dimension = OneOf | Interval
Space = Mapping[str, Dimension]


def drawn(space: Space, seed: int, number: int) -> Params:
    """The values of trial `number`, by a stream of random numbers of its own: the same whenever it is drawn."""
    rng = random.Random(f"sweep/{seed}/{number}")
    return {key: dimension.at(rng.random()) for key, dimension in space.items()}


def cells(space: Space) -> Iterator[Params]:
    """Every combination of all dimensions' values, the last dimension the quickest."""
    for values in itertools.product(*(dimension.cells() for dimension in space.values())):
        yield dict(zip(space, values, strict=True))


def explored(space: Space, params: Params, rng: random.Random) -> Params:
    """Values near those of another trial."""
    return {key: dimension.near(params[key], rng) for key, dimension in space.items()}
