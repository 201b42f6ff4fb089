"""Error feedback: what was not sent is added to the next gradient.

Seide et al., "1-bit stochastic gradient descent" (2014); Stich et al., "Sparsified SGD with memory" (2018); Karimireddy
et al., "Error feedback fixes SignSGD" (2019). Nothing is lost, only late: all sums of a run and what is left add up to
all gradients. With a decay, `ef:beta=0.95`, what stays unsent for long fades (Sarfi et al., "SparseLoCo", 2025).
"""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from unisono.codecs import BucketMemory, Codec, Coder, Exchange
from unisono.codecs._marks import Around, AroundCoder, hearing
from unisono.spec.family import Mark
from unisono.spec.work import Work

if TYPE_CHECKING:
    from torch import Size, Tensor

LEFT = "left"


class ErrorFeedback(Mark):
    """What was not sent is added to the next gradient, one float an element."""

    name = "ef"
    main = "beta"

    beta: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="share of what was not sent that the next step still has; 1: all of it",
    )

    def misfit(self, member: Any) -> str:
        return unheard(member)

    def around(self, member: Any) -> "FedCodec":
        return FedCodec(inner=member, beta=self.beta)


def unheard(codec: Codec) -> str:
    """Why nothing that keeps what was not sent can stand around a codec; "" where it can."""
    if codec.owed:
        return "it has a memory of what was not sent already, and two would count everything twice"
    if not codec.tells:
        return "it loses nothing that could be fed back, or does not say what it sent (Sent)"
    if not codec.contracts:
        return (
            "what it misses may be as large as what it is given, so what is kept would grow from step to step"
        )
    return ""


class FedCodec(Around):
    """A codec with error feedback around it."""

    name = "fed"

    beta: float = 1.0
    owed: ClassVar[bool] = True  # type: ignore[override]

    def lost(self, dp: int) -> float:
        """What is missing now, and what comes late, which was encoded with remains of its own. Of what is hardly ever
        sent, no more is late than what was not among the largest before."""
        inner = self.inner.lost(dp)
        return 2.0 * inner + 1.0 if inner >= 0.5 else inner * (2.0 + inner / (1.0 - inner))

    def work(self, shapes: Sequence[tuple[int, ...]], itemsize: int, dp: int) -> Work:
        nbytes = sum(map(prod, shapes)) * itemsize
        return self.more(self.inner.work(shapes, itemsize, dp), nbytes, 5 * nbytes)

    def bind(self) -> "FedCoder":
        from unisono.codecs._watched import bound

        return FedCoder(bound(self.inner), self.beta)


class FedCoder(AroundCoder):
    """left [n]: what this replica has not sent yet."""

    def __init__(self, inner: Coder, beta: float = 1.0) -> None:
        super().__init__(inner, (LEFT,))
        self.beta = beta

    def exchange(self, grad: "Tensor", shapes: "Sequence[Size]", memory: BucketMemory) -> Exchange:
        left = memory[LEFT]
        if self.beta != 1.0:
            left.mul_(self.beta)
        left.add_(grad)
        grad.copy_(left)

        def keep_error(sent: "Tensor") -> None:
            left[: len(sent)].sub_(sent)

        return (yield from hearing(self.inner.exchange(grad, shapes, memory), keep_error))
