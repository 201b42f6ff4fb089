"""Local SGD: h local steps on each replica, then the mean of their weights (Stich 2018, arXiv 1805.09767).

With a warm-up, the first steps are lock-step (post-local SGD, Lin et al. 2018, arXiv 1808.07217).

Fidelity: LOSSY. Identities: the same samples on all replicas give what one replica gives; h=1 gives `every_step` for an
optimiser that is linear in the gradient, without clipping.
"""

from typing import Any, ClassVar

from pydantic import Field

from unisono.spec.work import Durations, Work
from unisono.sync import Identity
from unisono_contrib.sync._local import GroupedPolicy, pace_of_rounds, rounds_work


class LocalSgd(GroupedPolicy):
    """Every h-th step, the mean of the replicas' weights."""

    name = "local_sgd"
    main: ClassVar[str] = "h"
    identities = (
        Identity("local_sgd:h=1", "every_step"),
        Identity("local_sgd:h=3", "every_step", alike=True),
        Identity("local_sgd:h=2,warmup=6", "every_step"),
    )

    h: int = Field(default=4, ge=1, description="steps of a round; replicas meet once in it")
    warmup: int = Field(default=0, ge=0, description="steps of lock-step before the first round")

    def pace(self, durations: Durations) -> float:
        return pace_of_rounds(durations, self.h, self.inside)

    def work(self, gradient_bytes: int, dp: int) -> Work:
        return rounds_work(gradient_bytes, dp, self.h, self.inside)

    def bind_outer(self, site: Any) -> Any:
        from unisono_contrib.sync._rounds import RoundsSync, Timing, nesterov

        return RoundsSync(site, Timing(self.h, warmup=self.warmup), nesterov(1.0, 0.0))
