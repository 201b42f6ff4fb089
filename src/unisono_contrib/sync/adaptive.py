"""Local SGD whose rounds get shorter as the loss falls (AdaComm, Wang and Joshi 2018, arXiv 1810.08313).

Few meetings are cheap and enough while the loss is high; near the end the replicas' differences are what keeps it up.
After every `every` steps the round becomes ceil(h * sqrt(F / F1)) steps long, where F is the mean loss of the meetings
since the last choice and F1 that of the first one; where that is not shorter, `gamma` times as long as before.

Fidelity: LOSSY. Identities: with `every` beyond the run's end it is `local_sgd` with the same h; the same samples on
all replicas give what one replica gives.
"""

from typing import Any, ClassVar

from pydantic import Field

from unisono.spec.work import Durations, Work
from unisono.sync import Identity
from unisono_contrib.sync._local import GroupedPolicy, pace_of_rounds, rounds_work


class Adaptive(GroupedPolicy):
    """The mean of the replicas' weights after rounds that get shorter as the loss falls."""

    name = "adaptive"
    main: ClassVar[str] = "h"
    identities = (
        Identity("adaptive:h=3,every=100", "local_sgd:h=3"),
        Identity("adaptive:h=3,every=3,gamma=1", "every_step", alike=True),
    )

    h: int = Field(default=16, ge=1, description="steps of the first rounds, and of the longest")
    every: int = Field(default=100, ge=1, description="steps from one choice of the period to the next")
    gamma: float = Field(
        default=0.5, gt=0.0, le=1.0, description="what a round becomes where the loss makes it no shorter"
    )

    def pace(self, durations: Durations) -> float:
        return pace_of_rounds(durations, self.h, self.inside)

    def work(self, gradient_bytes: int, dp: int) -> Work:
        """As in the first rounds: later ones send more."""
        return rounds_work(gradient_bytes, dp, self.h, self.inside, chosen=5)

    def bind_outer(self, site: Any) -> Any:
        from unisono_contrib.sync._adaptive import AdaptiveSync

        return AdaptiveSync(site, self.h, self.every, self.gamma)
