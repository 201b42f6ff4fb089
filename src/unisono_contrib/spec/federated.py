"""What `[federated]` of a recipe chooses by name: splits, strategies, aggregates. No torch.

A *delta* is what a client has learnt in a round: its weights after its local steps minus those that it was sent, as one
vector [d] of all parameters that learn, in the order of the model.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from unisono.spec.errors import Problem
from unisono.spec.family import Family, Member

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


class SampleSplit(Member, ABC):
    """Which client has which training samples. by_class: it needs the class of each sample. apart: clients have data of
    their own, which their processes alone know; otherwise each sample is with exactly one client."""

    by_class: ClassVar[bool] = False
    apart: ClassVar[bool] = False

    @abstractmethod
    def assign(
        self, samples: int, classes: "np.ndarray | None", clients: int, seed: int
    ) -> "Sequence[np.ndarray]":
        """The samples of each client, int64, ascending. classes: int64 [samples]. The same arguments give the same
        split on any machine. Raises UsageError where there is none."""


class Aggregate(Member, ABC):
    """How the deltas of a round's clients become one. linear: it is a weighted mean, so that a sum of deltas that
    nobody sees one by one is enough for it, as under secure aggregation. ties: of clients between which nothing decides
    it takes the first."""

    linear: ClassVar[bool] = False
    ties: ClassVar[bool] = False

    @abstractmethod
    def combine(self, deltas: "Tensor", weights: "Tensor") -> "Tensor":
        """The delta of the round, float64 [d]. deltas: float64 [n, d], a row a client. weights: float64 [n], positive,
        such as samples. Neither is changed. Raises UsageError where so few clients are not enough for it."""


@dataclass(frozen=True, slots=True)
class LocalWork:
    """What a client has after its local steps. weights, start: [d], now and as it was sent them. rates: the sum of the
    learning rates of its steps. sent: vectors of the server's, `kept`: of this client's own, both [d] by name."""

    weights: "Tensor"
    start: "Tensor"
    rates: float
    sent: "Mapping[str, Tensor]" = field(default_factory=dict)
    kept: "Mapping[str, Tensor]" = field(default_factory=dict)


Equals = tuple[tuple[str, str], ...]
"""Identities: (a strategy with options, the one whose weights it must have, to the last bit)."""


class Strategy(Member, ABC):
    """What the server makes of a round's delta, and what clients add to their local steps.

    Both sides are functions of vectors that somebody else keeps. server_keeps: names of the server's, float64 [d].
    sends: those of them that clients are sent. client_keeps: names of what each client has for itself, [d] in the
    model's dtype, zeros before its first round. equals: identities that it is held to. asynchronous: the server waits
    for no round of clients and steps by a `buffer` of deltas.
    """

    asynchronous: ClassVar[bool] = False
    equals: ClassVar[Equals] = ()
    server_keeps: ClassVar[tuple[str, ...]] = ()
    sends: ClassVar[tuple[str, ...]] = ()
    client_keeps: ClassVar[tuple[str, ...]] = ()

    def problems(self, train: Any) -> Iterator[Problem]:
        """What of a recipe's [train] section it cannot be played with."""
        yield from ()

    def initial(self, name: str) -> float:
        """What each element of the server's vector `name` is before the first round."""
        return 0.0

    @abstractmethod
    def step(self, delta: "Tensor", kept: "Mapping[str, Tensor]") -> "Tensor":
        """On the server, once a round: float64 [d], what is added to the weights. delta: float64 [d], of the round.
        kept: the server's vectors, to be changed in place."""

    def pull(
        self, weights: "Tensor", start: "Tensor", sent: "Mapping[str, Tensor]", kept: "Mapping[str, Tensor]"
    ) -> "Tensor | None":
        """On a client, in each local step: what is added to its gradient, [d]; None: nothing. weights: before the step.
        start, sent, kept: as in `LocalWork`."""
        return None

    def learn(self, work: LocalWork) -> "Mapping[str, Tensor]":
        """On a client, after its local steps: what each of `client_keeps` grows by, [d]. The server hears of it."""
        return {}

    def hear(
        self, growth: "Mapping[str, Sequence[Tensor]]", clients: int, kept: "Mapping[str, Tensor]"
    ) -> None:
        """On the server, before `step`: what `learn` returned on the clients of the round, by name. clients: how many
        there are at all. kept: the server's vectors, to be changed in place."""

    def share(self, behind: int) -> float:
        """What a delta counts for whose client began `behind` server steps ago."""
        return 1.0


SPLITS: Family[SampleSplit] = Family(
    "split", "unisono_contrib.federated.splits", SampleSplit, "federated.split", ("C06", "C06")
)
AGGREGATES: Family[Aggregate] = Family(
    "aggregate", "unisono_contrib.federated.aggregates", Aggregate, "federated.aggregate", ("C06", "C06")
)
STRATEGIES: Family[Strategy] = Family(
    "strategy", "unisono_contrib.federated.strategies", Strategy, "federated.strategy", ("C06", "C06")
)
