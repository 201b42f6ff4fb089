"""FedBuff (Nguyen et al., "Federated learning with buffered asynchronous aggregation", 2022)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from unisono.spec.training import Count, NotNegative, Positive
from unisono_contrib.spec.federated import Strategy

if TYPE_CHECKING:
    from torch import Tensor


class FedBuff(Strategy):
    """Clients train all the time, and the server steps whenever it has a few deltas, old ones counting for less."""

    name: ClassVar[str] = "fedbuff"
    main: ClassVar[str] = "buffer"
    asynchronous: ClassVar[bool] = True

    buffer: Count = Field(default=10, description="deltas of one step of the server")
    lr: Positive = Field(default=1.0, description="how far the server goes along the mean delta")
    power: NotNegative = Field(
        default=0.5, description="a delta that is so many steps old counts for 1 / (1 + steps)^power"
    )

    def step(self, delta: "Tensor", kept: "Mapping[str, Tensor]") -> "Tensor":
        return self.lr * delta

    def share(self, behind: int) -> float:
        return (1.0 + behind) ** -self.power
