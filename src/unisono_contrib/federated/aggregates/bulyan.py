"""Bulyan: Krum's choice, then a trimmed mean (El Mhamdi et al., "The hidden vulnerability of distributed learning",
2018)."""

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from unisono_contrib.spec.federated import Aggregate

if TYPE_CHECKING:
    from torch import Tensor


class Bulyan(Aggregate):
    """Krum chooses n - 2 · attackers deltas; of each coordinate, the values nearest to their median are averaged.

    An attack on a few coordinates, which distances hardly show, is left out too. It needs 4 · attackers + 3 clients in
    a round. With no attackers it is the mean.
    """

    name: ClassVar[str] = "bulyan"
    main: ClassVar[str] = "attackers"
    ties: ClassVar[bool] = True  # the last two that are each other's nearest have one score
    attackers: Annotated[int, Field(ge=0)] = Field(
        default=1, description="clients of a round that may attack"
    )

    def combine(self, deltas: "Tensor", weights: "Tensor") -> "Tensor":
        from unisono_contrib.federated.aggregates._robust import middle, require_clients

        f, n = self.attackers, len(deltas)
        require_clients(self.name, n, f, 4 * f + 3, "4 · attackers + 3")
        chosen = self._chosen(deltas)
        values, shares = deltas[chosen], weights[chosen]
        far = (values - middle(values)).abs().nan_to_num(nan=float("inf"))
        kept = far.argsort(dim=0, stable=True)[: len(values) - 2 * f].sort(0).values
        shares = shares[kept]
        return (values.gather(0, kept) * shares).sum(0) / shares.sum(0)

    def _chosen(self, deltas: "Tensor") -> "Tensor":
        """Clients that Krum chooses one after the other, each among those that are left, in ascending order."""
        import torch

        from unisono_contrib.federated.aggregates._robust import krum_scores, squared_distances

        distances = squared_distances(deltas)
        left = list(range(len(deltas)))
        for _ in range(2 * self.attackers, len(deltas)):
            among = distances[left][:, left]
            left.pop(int(krum_scores(among, self.attackers).argmin()))
        chosen = sorted({*range(len(deltas))} - {*left})
        return torch.tensor(chosen, device=deltas.device)
