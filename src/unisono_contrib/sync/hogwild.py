"""Hogwild!: replicas of one host share one set of weights in memory and update it without locks (Recht, Ré, Wright &
Niu, "Hogwild!: a lock-free approach to parallelizing stochastic gradient descent", 2011, arXiv 1106.5730).

Each replica computes a gradient of whatever the weights are, and applies it at once. Updates may overwrite each other
in part, which is seldom where each touches few rows, as those of a recommender's tables do. The optimiser's state is
shared too. Nothing is sent. In every `meet`-th step replicas wait for each other, to hear of a request to stop and of
steps that are not of numbers.

Fidelity: LOSSY. Identity: one replica trains as `every_step` does.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import Field

from unisono.spec.errors import Problem
from unisono.spec.work import Work
from unisono.sync import Identity, OuterPolicy
from unisono_contrib.sync._local import plain_problems, usual_problems


class Hogwild(OuterPolicy):
    """Replicas of one host update one set of weights in shared memory, without locks."""

    name: ClassVar[str] = "hogwild"
    alone: ClassVar[bool] = True
    repeats: ClassVar[bool] = False
    identities = (Identity("hogwild", "every_step", replicas=1),)

    meet: int = Field(
        default=100, ge=1, description="steps from one meeting, where a request to stop is heard, to the next"
    )

    def problems(self, plan: Any, batch: Any) -> Iterator[Problem]:
        yield from usual_problems(self, plan)
        yield from plain_problems(plan, "gradients are not sent, they are applied where they are computed")
        said = f"sync={plan.sync}: replicas have one set of weights, which each computes with as it lies in memory"
        for key in ("shard", "pp", "cp", "tp", "ep"):
            if (ranks := getattr(plan, key)) > 1:
                what = (
                    f"{said}, and {key}={ranks} cuts a replica into ranks that would read different versions"
                )
                yield Problem("P16", what, f"plan.sync, plan.{key}", f"{key}=1, or sync=every_step")
        if plan.precision == "bf16" or plan.arithmetic.stochastic:
            what = f"{said}, and precision={plan.text('precision')} computes with copies that are rounded from it"
            yield Problem("P16", what, "plan.sync, plan.precision", "precision=fp32")

    def work(self, gradient_bytes: int, dp: int) -> Work:
        """Nothing is sent, and one set of weights serves all."""
        return Work()

    def bind_outer(self, site: Any) -> Any:
        from unisono_contrib.sync._hogwild import HogwildSync

        return HogwildSync(site, self.meet)
