"""The median of each coordinate (Yin et al., "Byzantine-robust distributed learning", 2018)."""

from typing import TYPE_CHECKING, ClassVar

from unisono_contrib.spec.federated import Aggregate

if TYPE_CHECKING:
    from torch import Tensor


class Median(Aggregate):
    """The median of each coordinate; clients count alike, since an attacker would claim a large weight.

    Fewer than half of the clients cannot move it beyond what the honest ones send.
    """

    name: ClassVar[str] = "median"

    def combine(self, deltas: "Tensor", weights: "Tensor") -> "Tensor":
        from unisono_contrib.federated.aggregates._robust import middle

        return middle(deltas)
