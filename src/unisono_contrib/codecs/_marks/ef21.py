"""Error feedback of 2021: differences are sent (Richtárik et al., "EF21", 2021).

Every replica keeps an estimate of its own gradient and sends what the gradient has moved away from it. Estimates of all
replicas add up to the gradient that is used, so they follow it, and nothing that was missed piles up.
"""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from unisono.codecs import BucketMemory, Coder, Exchange
from unisono.codecs._marks import Around, AroundCoder, hearing
from unisono.codecs._marks.ef import unheard
from unisono.spec.family import Mark
from unisono.spec.work import Work

if TYPE_CHECKING:
    from torch import Size, Tensor

OWN, ALL = "estimate", "estimates"


class DifferenceFeedback(Mark):
    """What the gradient has moved away from an estimate is sent, and the estimate follows; two floats an element."""

    name = "ef21"

    def misfit(self, member: Any) -> str:
        return unheard(member)

    def around(self, member: Any) -> "FollowingCodec":
        return FollowingCodec(inner=member)


class FollowingCodec(Around):
    """A codec for differences of gradients."""

    name = "following"

    owed: ClassVar[bool] = True  # type: ignore[override]

    def lost(self, dp: int) -> float:
        """An error of a difference, which is at most twice a gradient."""
        return 2.0 * self.inner.lost(dp)

    def work(self, shapes: Sequence[tuple[int, ...]], itemsize: int, dp: int) -> Work:
        nbytes = sum(map(prod, shapes)) * itemsize
        return self.more(self.inner.work(shapes, itemsize, dp), 2 * nbytes, 8 * nbytes)

    def bind(self) -> "FollowingCoder":
        from unisono.codecs._watched import bound

        return FollowingCoder(bound(self.inner))


class FollowingCoder(AroundCoder):
    """estimate [n]: of this replica's gradient. estimates [n]: this replica's share of their sum, which is the same on
    all; kept as a share so that the sum survives another number of replicas."""

    def __init__(self, inner: Coder) -> None:
        super().__init__(inner, (OWN, ALL))

    def exchange(self, grad: "Tensor", shapes: "Sequence[Size]", memory: BucketMemory) -> Exchange:
        estimate, shared = memory[OWN], memory[ALL]
        grad.sub_(estimate)

        def keep_error(sent: "Tensor") -> None:
            estimate[: len(sent)].add_(sent)

        moved = yield from hearing(self.inner.exchange(grad, shapes, memory), keep_error)
        shared.add_(moved, alpha=1.0 / memory.replicas)
        return shared * memory.replicas
