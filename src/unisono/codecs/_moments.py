"""First moments in the place of gradients, for optimisers whose second moment does not see what was coded.

Tang et al., "1-bit Adam" (2021); Lu et al., "0/1 Adam" (2022). A moment changes little from step to step, so its error
feedback has little to make good, and one bit an element does for it.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from unisono.codecs import BucketMemory, Coder, Exchange, Sum
from unisono.codecs._marks import AroundCoder

if TYPE_CHECKING:
    from torch import Size, Tensor

MOMENT = "moment"


class MomentCoder(AroundCoder):
    """A live codec that is given the moment which an optimiser is about to make, and returns the gradient from which
    the optimiser's own formula makes the moment that was decoded. So nothing else in a step knows of it.

    decay: of the moment. whole_steps(step): in how many of the first `step` steps gradients cross as they are.
    updates(): how many the optimiser has made, the same on all ranks. moment [n]: this replica's share of the moment,
    the same on all; kept as a share so that the moment survives another number of replicas.
    """

    def __init__(
        self, inner: Coder, decay: float, whole_steps: Callable[[int], int], updates: Callable[[], int]
    ) -> None:
        super().__init__(inner, (MOMENT,))
        self.decay, self.whole_steps, self.updates = decay, whole_steps, updates

    def exchange(self, grad: "Tensor", shapes: "Sequence[Size]", memory: BucketMemory) -> Exchange:
        step, share, replicas = self.updates(), memory[MOMENT], memory.replicas
        whole = self.whole_steps(step)
        if self.whole_steps(step + 1) > whole:
            total = yield Sum(grad)
            share.mul_(self.decay).add_(total, alpha=(1.0 - self.decay) / replicas)
            return total
        share.mul_(self.decay)
        grad.mul_(1.0 - self.decay).add_(share)
        # The codec counts its own steps, or what it does in its first one would never be done.
        memory.step = step - whole
        moment = yield from self.inner.exchange(grad, shapes, memory)
        total = moment.sub(share, alpha=replicas).div_(1.0 - self.decay)
        share.copy_(moment).div_(replicas)
        return total
