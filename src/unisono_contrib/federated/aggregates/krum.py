"""Krum: the delta with the nearest neighbours (Blanchard et al., "Machine learning with adversaries", 2017)."""

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from unisono_contrib.spec.federated import Aggregate

if TYPE_CHECKING:
    from torch import Tensor


class Krum(Aggregate):
    """One client's delta: the one whose nearest others are nearest. It needs 2 · attackers + 3 clients in a round.

    Weights count for nothing, since an attacker would claim a large one. It learns from one client in a round, and is
    noisier than `multi_krum`.
    """

    name: ClassVar[str] = "krum"
    main: ClassVar[str] = "attackers"
    ties: ClassVar[bool] = True
    attackers: Annotated[int, Field(ge=0)] = Field(
        default=1, description="clients of a round that may attack"
    )

    def combine(self, deltas: "Tensor", weights: "Tensor") -> "Tensor":
        from unisono_contrib.federated.aggregates._robust import (
            krum_scores,
            require_clients,
            squared_distances,
        )

        require_clients(self.name, len(deltas), self.attackers, 2 * self.attackers + 3, "2 · attackers + 3")
        return deltas[int(krum_scores(squared_distances(deltas), self.attackers).argmin())].clone()
