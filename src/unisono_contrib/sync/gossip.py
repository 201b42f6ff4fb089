"""Gossip: replicas mix their weights with those of a few others, and never all at once.

Decentralised parallel SGD (D-PSGD, Lian et al. 2017, arXiv 1705.09056) on a graph; with `push`, stochastic gradient
push (Assran et al. 2019, arXiv 1811.10792); with `gamma`, and a codec if any, CHOCO-SGD (Koloskova et al. 2019, arXiv
1902.00340). `graph=pairs` averages random pairs, as AD-PSGD does (Lian et al. 2018, arXiv 1710.06952).

Fidelity: LOSSY. Identities: the same samples on all replicas give what one replica gives; `graph=complete` gives
`local_sgd` with the same h; push-sum on a graph that keeps the mean by itself gives D-PSGD, with weights of exactly 1;
CHOCO with the plain codec and gamma=1 gives D-PSGD.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import Field

from unisono.plan.grammar import named
from unisono.spec.errors import Problem
from unisono.spec.fidelity import Fidelity
from unisono.spec.work import Durations, Work
from unisono.sync import Identity
from unisono_contrib.sync._graphs import FIXED, Beat, Graph, most_messages, pace_of
from unisono_contrib.sync._local import GroupedPolicy, gossip_work


class Gossip(GroupedPolicy):
    """Every h-th step, each replica's weights mixed with those of its neighbours in a graph."""

    name = "gossip"
    main: ClassVar[str] = "graph"
    identities = (
        Identity("gossip:ring", "every_step", alike=True, replicas=4),
        Identity("gossip:complete", "local_sgd:h=1", replicas=4),
        Identity("gossip:complete,h=3", "local_sgd:h=3"),
        Identity("gossip:exponential,push=true", "gossip:exponential", replicas=4),
        Identity("gossip:ring,gamma=1", "gossip:ring", replicas=4),
    )

    graph: Graph = Field(
        default="ring",
        description="who hears whom: ring, torus, exponential, one_peer (one hop of an exponential graph a round), "
        "complete, star, pairs (drawn for each round), random (each tells one other; needs push)",
    )
    h: int = Field(default=1, ge=1, description="steps from one round of mixing to the next")
    push: bool = Field(default=False, description="push-sum: each replica has a weight, which is mixed too")
    gamma: float | None = Field(
        default=None,
        gt=0.0,
        le=1.0,
        description="CHOCO's step towards neighbours' public copies; a codec needs it",
    )
    report: int = Field(
        default=16,
        ge=1,
        description="steps from one meeting of all, for loss, stop and consensus, to the next",
    )

    def problems(self, plan: Any, batch: Any) -> Iterator[Problem]:
        yield from super().problems(plan, batch)
        said = f"sync={plan.sync}"
        if self.graph == "random" and not self.push:
            what = f"{said}: how many a replica hears differs, and without push the mean of all would drift"
            yield Problem("P16", what, "plan.sync", f"{said.removeprefix('sync=')},push=true, or graph=pairs")
        codec = named("codec", plan.codec)
        coded = codec is not None and codec.fidelity is not Fidelity.EXACT
        if coded or self.gamma is not None:
            yield from self._copies_problems(plan, f"codec={plan.codec}" if coded else f"gamma={self.gamma}")
        if coded:
            yield from _codec_problems(plan, codec)

    def _copies_problems(self, plan: Any, why: str) -> Iterator[Problem]:
        """What speaks against public copies. why: they are there."""
        said = f"sync={plan.sync}"
        if self.graph not in FIXED:
            what = f"{said}: with {why} each replica keeps copies of its neighbours, and these change here"
            yield Problem("P16", what, "plan.sync, plan.codec", "graph=ring, or codec=plain without gamma")
        if self.push:
            what = f"{said}: push-sum sends weights as they are, and with {why} differences of public copies cross"
            yield Problem("P16", what, "plan.sync, plan.codec", "push=false, or codec=plain without gamma")
        if self.gamma is None:
            what = f"{said}: with {why} it must be said how far weights go towards public copies"
            yield Problem("P23", what, "plan.sync, plan.codec", "gamma=0.3 in sync, or codec=plain")

    @property
    def beat(self) -> Beat:
        return Beat(self.graph, self.h, self.report)

    def pace(self, durations: Durations) -> float:
        return pace_of(self.beat, durations, self.inside)

    def work(self, gradient_bytes: int, dp: int) -> Work:
        replicas = max(1, dp // self.inside)
        messages = most_messages(self.graph, replicas)
        kept = 0  # a copy of what the last round left; or public ones, of oneself and of those that one hears
        if self.push:
            kept = gradient_bytes + 8
        elif self.gamma is not None:
            kept = gradient_bytes * (1 + messages)
        message = gradient_bytes + 8 * self.push
        return gossip_work(gradient_bytes, dp, self.inside, self.report, message, messages / self.h, kept)

    def bind_outer(self, site: Any) -> Any:
        from unisono_contrib.sync._choco import ChocoSync
        from unisono_contrib.sync._mixing import MixingSync, PushSync

        if self.gamma is not None:
            return ChocoSync(site, self.beat, self.gamma)
        return PushSync(site, self.beat) if self.push else MixingSync(site, self.beat)


def _codec_problems(plan: Any, codec: Any) -> Iterator[Problem]:
    """Why one replica cannot decode what another one has encoded by itself, or copies would run away."""
    if codec.owed:
        what = f"sync={plan.sync}: public copies feed back what codec={plan.codec} has not sent, and it keeps that too"
        yield Problem("P23", what, "plan.sync, plan.codec", f"codec={plan.codec.partition('+')[0]}")
    if codec.matrix:
        what = f"codec={plan.codec} needs all replicas for each sum, and under sync={plan.sync} neighbours alone talk"
        yield Problem("P23", what, "plan.sync, plan.codec", "codec=topk")
    if codec.varies:
        what = f"sync={plan.sync}: a neighbour must know how much it gets, and of codec={plan.codec} it would not"
        yield Problem("P23", what, "plan.sync, plan.codec", "codec=topk")
    if not codec.contracts:
        what = f"codec={plan.codec} may miss more than it is given, so public copies under sync={plan.sync} run away"
        yield Problem("P23", what, "plan.sync, plan.codec", "codec=topk")
