"""NoLoCo: rounds of h local steps, then an outer step with one random other replica (2025, arXiv 2506.10911).

Kolehmainen et al. No collective ends a round: replicas talk in pairs, drawn anew each time. Nesterov's outer step has a
term that pulls both of a pair together, since nothing else keeps slow weights from going apart. Of an odd number of
replicas one rests: it takes its outer step by itself, from what it has learnt.

Fidelity: LOSSY. Identities: the same samples on all replicas give what one replica gives; with two replicas, drift=1
and outer_momentum=0 it is DiLoCo with the same h and outer_lr.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import Field

from unisono.spec.errors import Problem
from unisono.spec.work import Durations, Work
from unisono.sync import Identity
from unisono_contrib.sync._graphs import Beat, pace_of
from unisono_contrib.sync._local import GroupedPolicy, gossip_work, plain_problems


class Noloco(GroupedPolicy):
    """Every h-th step, an outer step of random pairs of replicas."""

    name = "noloco"
    main: ClassVar[str] = "h"
    identities = (
        Identity("noloco:h=3,outer_lr=1,outer_momentum=0", "every_step", alike=True, replicas=4),
        Identity("noloco:h=3,outer_momentum=0", "diloco:h=3,outer_momentum=0"),
    )

    h: int = Field(default=50, ge=1, description="steps of a round; pairs talk once in it")
    outer_lr: float = Field(default=0.7, gt=0.0, description="learning rate of the outer step")
    outer_momentum: float = Field(default=0.5, ge=0.0, lt=1.0, description="its momentum")
    drift: float = Field(
        default=1.0, gt=0.0, description="how much of their distance a pair takes back; 1: all of it"
    )
    report: int = Field(
        default=0, ge=0, description="steps from one meeting of all to the next; 0: four rounds"
    )

    @property
    def reported(self) -> int:
        """Steps from one meeting of all to the next."""
        return self.report or 4 * self.h

    def problems(self, plan: Any, batch: Any) -> Iterator[Problem]:
        yield from super().problems(plan, batch)
        yield from plain_problems(plan, "an outer step needs what a pair has learnt as it is")
        most = (2.0 + self.outer_momentum**2) ** 0.5
        if not self.outer_momentum < self.drift < most:
            what = (
                f"sync={plan.sync}: slow weights go apart unless drift is between outer_momentum="
                f"{self.outer_momentum:g} and {most:.3g}, and it is {self.drift:g}"
            )
            yield Problem("P16", what, "plan.sync", "drift=1")

    @property
    def beat(self) -> Beat:
        return Beat("pairs", self.h, self.reported)

    def pace(self, durations: Durations) -> float:
        return pace_of(self.beat, durations, self.inside)

    def work(self, gradient_bytes: int, dp: int) -> Work:
        messages = (1.0 if dp // self.inside > 1 else 0.0) / self.h
        kept = message = 2 * gradient_bytes
        return gossip_work(gradient_bytes, dp, self.inside, self.reported, message, messages, kept)

    def bind_outer(self, site: Any) -> Any:
        from unisono_contrib.sync._noloco import NolocoSync

        return NolocoSync(site, self.beat, self.outer_lr, self.outer_momentum, self.drift)
