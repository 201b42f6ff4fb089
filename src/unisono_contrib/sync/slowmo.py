"""SlowMo: local SGD with a slow momentum over rounds (Wang et al. 2019, arXiv 1910.00643).

Every h-th step replicas take the mean of their weights. What the mean is away from the weights of the round before,
divided by the learning rate, goes into a momentum, by which all weights move. With one replica and slow_momentum=0 it
is Lookahead (Zhang et al. 2019). Each replica keeps the state of its inner optimiser over a meeting.

Fidelity: LOSSY. Identities: slow_lr=1,slow_momentum=0 gives `local_sgd`; with one replica that is plain training; the
same samples on all replicas give what one replica gives.
"""

from typing import Any, ClassVar

from pydantic import Field

from unisono.spec.work import Durations, Work
from unisono.sync import Identity
from unisono_contrib.sync._local import GroupedPolicy, pace_of_rounds, rounds_work


class SlowMo(GroupedPolicy):
    """Every h-th step, the mean of the replicas' weights, taken by a slow momentum in units of the learning rate."""

    name = "slowmo"
    main: ClassVar[str] = "h"
    alone = True
    identities = (
        Identity("slowmo:h=2,slow_lr=1,slow_momentum=0", "local_sgd:h=2"),
        Identity("slowmo:h=3,slow_momentum=0.5", "slowmo:h=3,slow_momentum=0.5", alike=True),
        Identity("slowmo:h=3,slow_lr=1,slow_momentum=0", "every_step", replicas=1),
    )

    h: int = Field(default=12, ge=1, description="steps of a round; replicas meet once in it")
    slow_lr: float = Field(
        default=1.0, gt=0.0, description="share of the slow momentum by which weights move (alpha)"
    )
    slow_momentum: float = Field(default=0.7, ge=0.0, lt=1.0, description="decay of the slow momentum (beta)")
    warmup: int = Field(default=0, ge=0, description="steps of lock-step before the first round")

    def pace(self, durations: Durations) -> float:
        return pace_of_rounds(durations, self.h, self.inside)

    def work(self, gradient_bytes: int, dp: int) -> Work:
        return rounds_work(gradient_bytes, dp, self.h, self.inside, momentum=self.slow_momentum > 0.0)

    def bind_outer(self, site: Any) -> Any:
        from unisono_contrib.sync._rounds import Timing
        from unisono_contrib.sync._slowmo import SlowMoSync

        return SlowMoSync(site, Timing(self.h, warmup=self.warmup), self.slow_lr, self.slow_momentum)
