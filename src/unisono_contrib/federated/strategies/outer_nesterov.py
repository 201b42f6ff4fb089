"""The outer optimiser of DiLoCo on the server (Douillard et al., "DiLoCo", 2023)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from unisono.spec.training import Positive, Share
from unisono_contrib.federated.strategies._momentum import VELOCITY, momentum_step
from unisono_contrib.spec.federated import Equals, Strategy

if TYPE_CHECKING:
    from torch import Tensor


class OuterNesterov(Strategy):
    """SGD with Nesterov's momentum on the server, as `sync=diloco` has it."""

    name: ClassVar[str] = "outer_nesterov"
    equals: ClassVar[Equals] = (("outer_nesterov:outer_lr=1,outer_momentum=0", "fedavg"),)
    server_keeps: ClassVar[tuple[str, ...]] = (VELOCITY,)

    outer_lr: Positive = Field(default=0.7, description="learning rate of the server")
    outer_momentum: Share = Field(default=0.9, description="decay of the velocity; 0: plain SGD")

    def step(self, delta: "Tensor", kept: "Mapping[str, Tensor]") -> "Tensor":
        return momentum_step(delta, kept[VELOCITY], self.outer_lr, self.outer_momentum, nesterov=True)
