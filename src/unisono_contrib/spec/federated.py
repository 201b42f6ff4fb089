"""What `[federated]` of a recipe chooses by name: strategies, aggregates, splits. No torch.

A *delta* is what a client has learnt in a round: its weights after its local steps minus those that it was sent, as one
vector [d] of all parameters in the order of the model.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from unisono.spec.family import Family, Member

if TYPE_CHECKING:
    from torch import Tensor


class Aggregate(Member, ABC):
    """How the deltas of a round's clients become one."""

    @abstractmethod
    def combine(self, deltas: "Tensor", weights: "Tensor") -> "Tensor":
        """The delta of the round, float64 [d]. deltas: float64 [n, d], a row a client. weights: float64 [n], positive,
        such as samples. Neither is changed. Raises UsageError where so few clients are not enough for it."""


AGGREGATES: Family[Aggregate] = Family(
    "aggregate", "unisono_contrib.federated.aggregates", Aggregate, "federated.aggregate", ("C06", "C06")
)
