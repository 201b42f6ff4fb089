"""FedAvgM (Hsu et al., "Measuring the effects of non-identical data distribution", 2019)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from unisono.spec.training import Positive, Share
from unisono_contrib.federated.strategies._momentum import VELOCITY, momentum_step
from unisono_contrib.spec.federated import Equals, Strategy

if TYPE_CHECKING:
    from torch import Tensor


class FedAvgM(Strategy):
    """FedAvg with momentum on the server."""

    name: ClassVar[str] = "fedavgm"
    equals: ClassVar[Equals] = (("fedavgm:beta=0,lr=1", "fedavg"),)
    server_keeps: ClassVar[tuple[str, ...]] = (VELOCITY,)

    lr: Positive = Field(default=1.0, description="learning rate of the server")
    beta: Share = Field(default=0.9, description="decay of the velocity")

    def step(self, delta: "Tensor", kept: "Mapping[str, Tensor]") -> "Tensor":
        return momentum_step(delta, kept[VELOCITY], self.lr, self.beta, nesterov=False)
