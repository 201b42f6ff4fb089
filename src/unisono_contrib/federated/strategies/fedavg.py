"""FedAvg (McMahan et al., "Communication-efficient learning of deep networks from decentralized data", 2017)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from unisono.spec.training import Positive
from unisono_contrib.spec.federated import Strategy

if TYPE_CHECKING:
    from torch import Tensor


class FedAvg(Strategy):
    """The weights become the mean of the clients' weights."""

    name: ClassVar[str] = "fedavg"
    lr: Positive = Field(default=1.0, description="how far the server goes along the mean delta")

    def step(self, delta: "Tensor", kept: "Mapping[str, Tensor]") -> "Tensor":
        return self.lr * delta
