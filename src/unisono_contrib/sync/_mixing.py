"""Weights that are mixed as they are: D-PSGD, and push-sum where the graph alone would not keep the mean."""

from collections.abc import Mapping, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from unisono.sync._outer import Site
from unisono_contrib.sync._gossip import GossipSync, weighted
from unisono_contrib.sync._graphs import Beat
from unisono_contrib.sync._peers import packed, unpacked


class MixingSync(GossipSync):
    """Each replica becomes the weighted mean of those that it hears (D-PSGD, Lian et al. 2017).

    Weights are mixed after the update. Lian et al. mix while the gradient is computed; both have the same mean."""

    def talk(self, number: int) -> None:
        matrix = self.matrix(number)
        self._mixed = weighted(self.heard(packed(self.masters), matrix), matrix[self.group.index])

    def take(self) -> None:
        _fill(self.masters, unpacked(self._mixed, self.masters))

    def end(self, mean: Sequence[Tensor]) -> None:
        _fill(self.masters, mean)


class PushSync(GossipSync):
    """Stochastic gradient push (Assran et al. 2019): columns of the matrix add up to 1, rows need not.

    Each replica has x and a weight w, which are mixed alike, and computes with z = x / w. An update moves x as it moves
    z. Of x nothing is kept: it is `w · before + (z - before)`, where `before` is z after the last round.

    State, private to a replica: `push_weight`, float64 [1]; `NAME/before`."""

    def __init__(self, site: Site, beat: Beat) -> None:
        super().__init__(site, beat)
        self.weight = torch.ones(1, dtype=torch.float64)
        self.before = {name: x.clone() for name, x in self.local.items()}

    def parts(self) -> list[Tensor]:
        """x of each parameter; z itself where w is 1."""
        w = self.mass()
        if w == 1.0:
            return self.masters
        return [z + (w - 1.0) * self.before[name] for name, z in self.local.items()]

    def mass(self) -> float:
        return float(self.weight)

    def talk(self, number: int) -> None:
        matrix = self.matrix(number)
        row = matrix[self.group.index]
        flats = [*packed(self.parts()), self.weight.to(self.site.device)]
        heard = self.heard(flats, matrix)
        *self._mixed, _ = weighted(heard, row)
        # Of exact fractions, so that weights of 1 stay exactly 1 where rows add up to it.
        weights = {j: Fraction(float(flats[-1])) for j, flats in heard.items()}
        self._weight = float(sum((row[j] * weights[j] for j in row), Fraction(0)))

    def take(self) -> None:
        mixed = self._mixed if self._weight == 1.0 else [x.div_(self._weight) for x in self._mixed]
        _fill(self.masters, unpacked(mixed, self.masters))
        self._forget(self._weight)

    def end(self, mean: Sequence[Tensor]) -> None:
        _fill(self.masters, mean)
        self._forget(1.0)

    def private_state(self) -> Mapping[str, Tensor]:
        return {"push_weight": self.weight, **{f"{n}/before": x for n, x in self.before.items()}}

    @torch.no_grad()
    def begin(self) -> None:
        self._forget(1.0)

    def _forget(self, weight: float) -> None:
        """A round is over: z is what the next one begins with."""
        self.weight.fill_(weight)
        _fill(list(self.before.values()), self.masters)


def _fill(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for x, value in zip(into, values, strict=True):
        x.copy_(value)
