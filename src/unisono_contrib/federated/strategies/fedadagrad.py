"""FedAdagrad (Reddi et al., "Adaptive federated optimization", 2021)."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from unisono.spec.training import Share
from unisono_contrib.federated.strategies._adaptive import AdaptiveServer

if TYPE_CHECKING:
    from torch import Tensor


class FedAdagrad(AdaptiveServer):
    """Adagrad on the server: its second moment only grows."""

    name: ClassVar[str] = "fedadagrad"

    beta1: Share = Field(default=0.0, description="decay of the first moment")

    def second(self, v: "Tensor", squared: "Tensor") -> "Tensor":
        return v + squared
