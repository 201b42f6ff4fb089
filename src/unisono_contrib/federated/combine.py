"""How the deltas of a round become what the server steps by: bounded, combined, and made private."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from unisono_contrib.federated.clients import unchanged
from unisono_contrib.federated.secure.rounds import Exchange, SecureSum, secure_sum
from unisono_contrib.federated.secure.terms import SecureTerms
from unisono_contrib.spec.federated import Aggregate

Noise = Callable[[Tensor, Tensor, int], Tensor]
"""(delta [d] of a round, weights [n] of its clients, which add up to 1, number of the round) → the delta with noise."""


def nothing(number: int) -> Mapping[str, Any]:
    return {}


def no_noise(delta: Tensor, weights: Tensor, number: int) -> Tensor:
    return delta


@dataclass(frozen=True, slots=True)
class Combiner:
    """aggregate: of the deltas. clip(delta): bounds what one client can say, on that client. It is called here once
    more, for a client may not have done so. noise: once a round, on the server. secure: of rounds in which nobody may
    see what is added up; for an aggregate that is `linear` alone. says(rounds): for the line of metrics of the last of
    these rounds."""

    aggregate: Aggregate
    clip: Callable[[Tensor], Tensor] = unchanged
    noise: Noise = no_noise
    secure: SecureTerms | None = None
    says: Callable[[int], Mapping[str, Any]] = nothing

    def __call__(self, deltas: Tensor, weights: Tensor, number: int) -> Tensor:
        """The delta of a round, float64 [d]. deltas: float64 [n, d]. weights: float64 [n], positive. Raises UsageError
        where so few clients are not enough."""
        if self.clip is not unchanged:
            deltas = torch.stack([self.clip(delta) for delta in deltas])
        return self.noise(self.aggregate.combine(deltas, weights), weights / weights.sum(), number)

    def summed(
        self, exchange: Exchange, weights: Mapping[int, float], terms: SecureTerms, number: int
    ) -> SecureSum:
        """The delta of a round whose deltas stay with the clients, which clip them. weights: by client, positive.
        Raises ValueError where an aggregate would have to see what it must not, UsageError as `secure_sum`."""
        if not self.aggregate.linear:
            raise ValueError(f"aggregate={self.aggregate.name} compares deltas, which a secure sum hides")
        total = sum(weights.values())
        shares = {client: weight / total for client, weight in weights.items()}
        summed = secure_sum(exchange, shares, terms, number)
        stayed = torch.tensor([weights[client] for client in summed.survivors], dtype=torch.float64)
        return replace(summed, delta=self.noise(summed.delta, stayed / stayed.sum(), number))


def stacked(deltas: list[Tensor]) -> Tensor:
    """float64 [n, d]."""
    return torch.stack([delta.double() for delta in deltas])
