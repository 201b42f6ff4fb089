"""The weighted mean of FedAvg (McMahan et al., "Communication-efficient learning", 2017)."""

from typing import TYPE_CHECKING, ClassVar

from unisono_contrib.spec.federated import Aggregate

if TYPE_CHECKING:
    from torch import Tensor


class Mean(Aggregate):
    """Each client counts for its weight: by default, its samples."""

    name: ClassVar[str] = "mean"
    linear: ClassVar[bool] = True

    def combine(self, deltas: "Tensor", weights: "Tensor") -> "Tensor":
        return (deltas * (weights / weights.sum())[:, None]).sum(0)
