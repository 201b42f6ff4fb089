"""The mean of each coordinate without its extremes (Yin et al., "Byzantine-robust distributed learning", 2018)."""

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from unisono_contrib.spec.federated import Aggregate

if TYPE_CHECKING:
    from torch import Tensor


class TrimmedMean(Aggregate):
    """The weighted mean of each coordinate, without a share of the smallest and of the largest values.

    A coordinate stays within what honest clients send while at most `share` of the clients attack. The share is of the
    clients, rounded down. With share 0 it is the mean.
    """

    name: ClassVar[str] = "trimmed_mean"
    main: ClassVar[str] = "share"
    share: Annotated[float, Field(ge=0.0, lt=0.5)] = Field(
        default=0.1, description="of the clients, left out at each end of each coordinate"
    )

    def combine(self, deltas: "Tensor", weights: "Tensor") -> "Tensor":
        n = len(deltas)
        out = int(self.share * n + 1e-9)  # 0.1 · 30 is 3, not 2.9999999999999996
        if not out:
            from unisono_contrib.federated.aggregates.mean import Mean

            return Mean().combine(deltas, weights)
        ordered, places = deltas.sort(0)
        kept = weights[places[out : n - out]]
        return (ordered[out : n - out] * kept).sum(0) / kept.sum(0)
