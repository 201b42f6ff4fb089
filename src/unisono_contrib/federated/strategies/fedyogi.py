"""FedYogi (Reddi et al., "Adaptive federated optimization", 2021)."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from unisono.spec.training import Positive, Share
from unisono_contrib.federated.strategies._adaptive import AdaptiveServer

if TYPE_CHECKING:
    from torch import Tensor


class FedYogi(AdaptiveServer):
    """Yogi on the server: its second moment changes by as much as a delta² at most, whichever is larger."""

    name: ClassVar[str] = "fedyogi"

    lr: Positive = Field(default=0.01, description="learning rate of the server")
    beta2: Share = Field(default=0.99, description="decay of the second moment")

    def second(self, v: "Tensor", squared: "Tensor") -> "Tensor":
        return v - (1.0 - self.beta2) * squared * (v - squared).sign()
