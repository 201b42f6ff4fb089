"""How the deltas of a round become what the server steps by: bounded, combined, and made private."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unisono_contrib.federated.clients import unchanged
from unisono_contrib.spec.federated import Aggregate

Noise = Callable[[Tensor, Tensor, int], Tensor]
"""(delta [d] of a round, weights [n] of its clients, which add up to 1, number of the round) → the delta with noise."""
SecureSum = Callable[[Tensor, int], Tensor]
"""(rows float64 [n, d], one a client that has answered, number of the round) → their sum [d], of which nobody has seen
a row."""


def nothing(number: int) -> Mapping[str, Any]:
    return {}


def no_noise(delta: Tensor, weights: Tensor, number: int) -> Tensor:
    return delta


@dataclass(frozen=True, slots=True)
class Combiner:
    """aggregate: of the deltas. clip(delta): bounds what one client can say, on that client. It is called here once
    more, for a client may not have done so. noise: once a round, on the server. total: takes the place of the sum,
    where nobody may see what is added up; for an aggregate that is `linear` alone. says(rounds): for the line of
    metrics of the last of these rounds."""

    aggregate: Aggregate
    clip: Callable[[Tensor], Tensor] = unchanged
    noise: Noise = no_noise
    total: SecureSum | None = None
    says: Callable[[int], Mapping[str, Any]] = nothing

    def __call__(self, deltas: Tensor, weights: Tensor, number: int) -> Tensor:
        """The delta of a round, float64 [d]. deltas: float64 [n, d]. weights: float64 [n], positive. Raises ValueError
        where an aggregate would have to see what it must not, UsageError where so few clients are not enough."""
        shares = weights / weights.sum()
        if self.clip is not unchanged:
            deltas = torch.stack([self.clip(delta) for delta in deltas])
        if self.total is None:
            delta = self.aggregate.combine(deltas, weights)
        elif self.aggregate.linear:
            delta = self.total(deltas * shares[:, None], number)
        else:
            raise ValueError(f"aggregate={self.aggregate.name} compares deltas, which a secure sum hides")
        return self.noise(delta, shares, number)


def stacked(deltas: list[Tensor]) -> Tensor:
    """float64 [n, d]."""
    return torch.stack([delta.double() for delta in deltas])
