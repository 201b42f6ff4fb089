"""Multi-Krum: the mean of the deltas with the nearest neighbours (Blanchard et al. 2017)."""

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from unisono.spec.errors import UsageError
from unisono_contrib.spec.federated import Aggregate

if TYPE_CHECKING:
    from torch import Tensor


class MultiKrum(Aggregate):
    """The weighted mean of the `keep` deltas whose nearest others are nearest. It needs 2 · attackers + 3 clients.

    With no attackers and all clients kept it is the mean.
    """

    name: ClassVar[str] = "multi_krum"
    main: ClassVar[str] = "attackers"
    ties: ClassVar[bool] = True
    attackers: Annotated[int, Field(ge=0)] = Field(
        default=1, description="clients of a round that may attack"
    )
    keep: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="deltas of a round that are averaged; absent: all but `attackers`"
    )

    def combine(self, deltas: "Tensor", weights: "Tensor") -> "Tensor":
        from unisono_contrib.federated.aggregates._robust import (
            krum_scores,
            require_clients,
            squared_distances,
        )
        from unisono_contrib.federated.aggregates.mean import Mean

        honest = len(deltas) - self.attackers
        require_clients(self.name, len(deltas), self.attackers, 2 * self.attackers + 3, "2 · attackers + 3")
        if self.keep is not None and self.keep > honest:
            what = f"multi_krum keeps {self.keep} of {len(deltas)} clients, and attackers={self.attackers} may be among"
            fix = f"keep={honest} or less"
            raise UsageError(f"{what} them", where="federated.aggregate", fix=fix, code="C06")
        scores = krum_scores(squared_distances(deltas), self.attackers)
        # In the clients' order, so that a mean of all has the same bits.
        chosen = scores.argsort(stable=True)[: honest if self.keep is None else self.keep].sort().values
        return Mean().combine(deltas[chosen], weights[chosen])
