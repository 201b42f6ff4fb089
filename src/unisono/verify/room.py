"""What the comparison of a plan's steps goes by, and how far the gradients of one of them may be off."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from unisono.config import TrainConfig
from unisono.parallel.stochastic import Dither
from unisono.verify import averages
from unisono.verify.bounds import Bounds
from unisono.verify.laws import Keep
from unisono.verify.record import Record


@dataclass(frozen=True, slots=True)
class CompareTerms:
    """What a comparison needs. owners: alias → owner of tied weights. lazy: names whose rows are stepped where
    they have a gradient alone. dither: how parameters without masters are rounded after an update. rhythm: steps of
    the run that make one step of the proof. lag: steps from a gradient to its update. average_step: see `Section`.
    parts: by name, how large the gradient's encoded parts are in this step, where that was looked for (`parts.py`)."""

    train: TrainConfig
    bounds: Bounds
    exact: bool
    owners: Mapping[str, str]
    lazy: frozenset[str] = frozenset()
    dither: Dither | None = None
    rhythm: int = 1
    lag: int = 0
    average_step: Callable[[int], float] = averages.no_average
    parts: Mapping[str, float] = field(default_factory=dict)

    def kept(self, name: str, step: int) -> Keep | None:
        """Return the function that rounds a whole parameter after the update of a step; None if nothing is rounded."""
        if self.dither is None:
            return None
        dither = replace(self.dither, step=(step + 1) * self.rhythm - 1 + self.lag)
        return lambda x: dither.rounded(x.float(), name, (0,) * x.dim(), x.shape).double()


@dataclass(frozen=True, slots=True)
class GradientRoom:
    """How far the gradients of a step may be off. largest: of the reference's before clipping, by key."""

    terms: CompareTerms
    ref: Record
    largest: Mapping[str, float]

    @classmethod
    def beside(cls, terms: CompareTerms, ref: Record) -> "GradientRoom":
        """ref: the reference's record of the step."""
        return cls(terms, ref, {key: largest_of(ref.whole(key)) for key in ref.names("raw")})

    def of(self, key: str) -> float:
        """Absolute error that one gradient may have."""
        name, bounds = key.partition("/")[2], self.terms.bounds
        bound = bounds.of(name)
        largest, most = self.largest.get(key, 0.0), max(self.largest.values(), default=0.0)
        contradicting = bounds.lost * max(0.0, self.terms.parts.get(name, 0.0) - largest)
        return bound * (largest if largest > bound * most else most) + contradicting

    def of_norm(self) -> float:
        """Relative error of the norm: of all gradients' errors together, and of its own sum."""
        sizes = {key: math.prod(self.ref.shapes[key]) for key in self.largest}
        elements = sum(sizes.values())
        square = sum(size * self.of(key) ** 2 for key, size in sizes.items())
        norm = self.ref.notes[0].norm
        rounding = 0.0 if self.terms.exact else self.terms.bounds.total(elements)
        return math.sqrt(square) / norm + rounding if norm else rounding

    def of_rate(self) -> float:
        """Relative error of the learning rate: none, unless it follows the noise of gradients."""
        paced = self.terms.train.optimiser().paced and not self.terms.exact
        return self.terms.bounds.rate(self.of_norm()) if paced else 0.0


def largest_of(x: Tensor | None) -> float:
    """The largest magnitude of an entry; 0 where there is none."""
    return x.double().abs().max().item() if x is not None and x.numel() else 0.0
