"""What all policies with parameter servers have in common: what they refuse, send and keep. No torch."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import Field

from unisono.plan.grammar import named
from unisono.spec.errors import Problem
from unisono.spec.fidelity import Fidelity
from unisono.spec.work import Call, Durations, Work
from unisono.sync import OuterPolicy
from unisono_contrib.sync._local import played, usual_problems
from unisono_contrib.sync._servers.rules import Rule


class ServedPolicy(OuterPolicy):
    """A policy under which weights and optimiser lie with servers. In a step, a replica pulls all weights and pushes
    its gradient; a server moves that of all replicas over its one link."""

    alone: ClassVar[bool] = True
    served: ClassVar[bool] = True
    repeats: ClassVar[bool] = False

    copies: int = Field(
        default=1, ge=1, description="servers that hold each parameter; all but one may be lost"
    )

    def problems(self, plan: Any, batch: Any) -> Iterator[Problem]:
        yield from usual_problems(self, plan)
        codec = named("codec", plan.codec)
        if codec is not None and codec.fidelity is not Fidelity.EXACT:
            what = f"sync={plan.sync}: gradients go to a server as they are, and codec={plan.codec} would do nothing"
            yield Problem("P16", what, "plan.sync, plan.codec", "codec=plain")

        if plan.dp != -1 and self.copies > plan.dp:
            what = f"sync={plan.sync}: copies are on different replicas, and there are dp={plan.dp}"
            yield Problem("P16", what, "plan.sync, plan.dp", f"copies={plan.dp}, or less")

    @abstractmethod
    def rule(self, replicas: int) -> Rule:
        """When a replica may read, and what makes an update."""

    def pace(self, durations: Durations) -> float:
        from unisono_contrib.sync._servers.simulate import play

        steps = played(durations)
        return play(self.rule(len(durations)), durations, steps).seconds / steps

    def work(self, gradient_bytes: int, dp: int) -> Work:
        return self.served_work(gradient_bytes, dp, 1)

    def served_work(self, gradient_bytes: int, dp: int, servers: int) -> Work:
        """Of a rank that carries a server. S bytes of weights are on n servers: each receives S/n of every replica's
        gradient and sends S/n to every replica. A gradient goes to every copy, and weights come from the first one;
        a rank holds at most so many parts as there are copies. What a server and its own replica say to each other
        crosses no link. The server's link is the busiest: it carries pushes in, and weights out."""
        servers = min(servers, dp)
        part, held = -(-gradient_bytes // servers), min(self.copies, servers)
        push = Call("dp", "push", gradient_bytes * self.copies, link=part * held * (dp - 1))
        return Work((push, Call("dp", "serve", part * dp, link=part * (dp - 1))), part * held * 3)
