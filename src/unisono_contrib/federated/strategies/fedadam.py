"""FedAdam (Reddi et al., "Adaptive federated optimization", 2021)."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from unisono.spec.training import Share
from unisono_contrib.federated.strategies._adaptive import AdaptiveServer

if TYPE_CHECKING:
    from torch import Tensor


class FedAdam(AdaptiveServer):
    """Adam on the server, without bias correction."""

    name: ClassVar[str] = "fedadam"

    beta2: Share = Field(default=0.99, description="decay of the second moment")

    def second(self, v: "Tensor", squared: "Tensor") -> "Tensor":
        return self.beta2 * v + (1.0 - self.beta2) * squared
