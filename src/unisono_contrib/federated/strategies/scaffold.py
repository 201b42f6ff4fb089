"""SCAFFOLD (Karimireddy et al., "SCAFFOLD: stochastic controlled averaging for federated learning", 2020).

Each client keeps a control variate, an estimate of its own gradient; the server has the mean of all. A local step goes
along `gradient - client's + server's`. After its steps a client's variate becomes the mean gradient that it went along
(option II of the paper): `client's - server's + (start - weights) / (sum of learning rates)`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from unisono.spec.errors import Problem
from unisono.spec.training import Positive
from unisono_contrib.spec.federated import Equals, LocalWork, Strategy

if TYPE_CHECKING:
    from torch import Tensor

CONTROL = "control"


class Scaffold(Strategy):
    """Clients correct their steps by how their gradient differs from the mean of all."""

    name: ClassVar[str] = "scaffold"
    equals: ClassVar[Equals] = (("scaffold:frozen=true", "fedavg"),)
    server_keeps: ClassVar[tuple[str, ...]] = (CONTROL,)
    sends: ClassVar[tuple[str, ...]] = (CONTROL,)
    client_keeps: ClassVar[tuple[str, ...]] = (CONTROL,)

    lr: Positive = Field(default=1.0, description="how far the server goes along the mean delta")
    frozen: bool = Field(default=False, description="control variates stay 0, which is FedAvg")

    def problems(self, train: Any) -> Iterator[Problem]:
        if train.optimiser().kept:
            what = (
                f"scaffold takes a client's mean gradient from its steps; {train.optimizer} is no plain SGD"
            )
            fix = 'optimizer = "sgd" with momentum = 0.0'
            yield Problem("C06", what, "train.optimizer, federated.strategy", fix)

    def step(self, delta: "Tensor", kept: "Mapping[str, Tensor]") -> "Tensor":
        return self.lr * delta

    def pull(
        self, weights: "Tensor", start: "Tensor", sent: "Mapping[str, Tensor]", kept: "Mapping[str, Tensor]"
    ) -> "Tensor | None":
        return None if self.frozen else sent[CONTROL] - kept[CONTROL]

    def learn(self, work: LocalWork) -> "Mapping[str, Tensor]":
        if self.frozen:
            return {CONTROL: work.kept[CONTROL] * 0.0}
        return {CONTROL: (work.start - work.weights) / work.rates - work.sent[CONTROL]}

    def hear(
        self, growth: "Mapping[str, Sequence[Tensor]]", clients: int, kept: "Mapping[str, Tensor]"
    ) -> None:
        for grown in growth[CONTROL]:
            kept[CONTROL].add_(grown.double(), alpha=1.0 / clients)
