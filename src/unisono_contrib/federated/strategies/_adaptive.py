"""Servers with an adaptive optimiser (Reddi et al., "Adaptive federated optimization", ICLR 2021, algorithm 2).

As the paper has it: the first moment is `m = beta1 · m + (1 - beta1) · delta`, the step `lr · m / (sqrt(v) + tau)`.
Neither moment is corrected for its bias. The second one begins at tau², the least that the paper allows.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from unisono.spec.training import Positive, Share
from unisono_contrib.spec.federated import Strategy

if TYPE_CHECKING:
    from torch import Tensor

M, V = "m", "v"


class AdaptiveServer(Strategy):
    """A server whose step is divided by the root of a second moment of deltas."""

    server_keeps: ClassVar[tuple[str, ...]] = (M, V)

    lr: Positive = Field(default=0.1, description="learning rate of the server")
    beta1: Share = Field(default=0.9, description="decay of the first moment")
    tau: Positive = Field(default=1e-3, description="added to the root of the second moment")

    def initial(self, name: str) -> float:
        return self.tau**2 if name == V else 0.0

    @abstractmethod
    def second(self, v: "Tensor", squared: "Tensor") -> "Tensor":
        """The second moment after a round. squared: delta²."""

    def step(self, delta: "Tensor", kept: "Mapping[str, Tensor]") -> "Tensor":
        m, v = kept[M], kept[V]
        m.mul_(self.beta1).add_((1.0 - self.beta1) * delta)
        v.copy_(self.second(v, delta * delta))
        return self.lr * m / (v.sqrt() + self.tau)
