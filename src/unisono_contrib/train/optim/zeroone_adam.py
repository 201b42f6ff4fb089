"""0/1 Adam (Lu et al., "Maximizing communication efficiency for large-scale training via 0/1 Adam", 2022): its second
moment. Its local steps, in which nothing crosses, are not here: replicas would hold different weights between two
rounds, which is a policy's affair."""

from typing import ClassVar

from pydantic import Field

from unisono.spec.training import Count
from unisono_contrib.train.optim._frozen import FrozenAdam


class ZeroOneAdam(FrozenAdam):
    """AdamW whose second moment learns ever more seldom; in between, the first one is what codecs on dp are given."""

    name: ClassVar[str] = "zeroone_adam"

    refreshes: Count = Field(
        default=16, description="zeroone_adam: times that the second moment learns before the gap doubles"
    )

    def whole_steps(self, step: int) -> int:
        """The first `refreshes` steps, then as many again two steps apart, then four, and so on."""
        count, begin, gap = 0, 0, 1
        while begin < step:
            span = min(step - begin, self.refreshes * gap)
            count, begin, gap = count - (-span // gap), begin + self.refreshes * gap, 2 * gap
        return count
