"""FedProx (Li et al., "Federated optimization in heterogeneous networks", 2020)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from unisono.spec.training import NotNegative, Positive
from unisono_contrib.spec.federated import Equals, Strategy

if TYPE_CHECKING:
    from torch import Tensor


class FedProx(Strategy):
    """FedAvg whose clients are pulled back to the weights that they were sent."""

    name: ClassVar[str] = "fedprox"
    main: ClassVar[str] = "mu"
    equals: ClassVar[Equals] = (("fedprox:mu=0", "fedavg"),)

    mu: NotNegative = Field(
        default=0.01, description="of the term mu/2 · |weights - start|² in a client's loss"
    )
    lr: Positive = Field(default=1.0, description="how far the server goes along the mean delta")

    def step(self, delta: "Tensor", kept: "Mapping[str, Tensor]") -> "Tensor":
        return self.lr * delta

    def pull(
        self, weights: "Tensor", start: "Tensor", sent: "Mapping[str, Tensor]", kept: "Mapping[str, Tensor]"
    ) -> "Tensor | None":
        return self.mu * (weights - start) if self.mu else None
