"""Momentum correction (Lin et al., "Deep gradient compression", 2018): velocities are sent in place of gradients.

Error feedback around a sparse codec sends an element seldom, as the sum of many gradients. Momentum in the optimiser
would take that for one large gradient. So each replica has the momentum itself, adds up velocities, and forgets the
velocity of an element that it has sent. The optimiser then is plain descent. While sparsity warms up, the share that is
sent falls from a quarter, geometrically, to the codec's own.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from unisono.codecs import BucketMemory, Codec, Coder, Exchange
from unisono.codecs._marks import Around, AroundCoder, hearing
from unisono.codecs._marks.ef import LEFT, FedCodec, unheard
from unisono.spec.errors import Problem
from unisono.spec.family import Mark
from unisono.spec.work import Work

if TYPE_CHECKING:
    from torch import Size, Tensor

VELOCITY = "velocity"
FIRST, STAGES = 0.25, 4
"""Share of elements that is sent in the first stage of a warm-up, and how many stages it has."""


class MomentumCorrection(Mark):
    """Each replica sends its velocity instead of its gradient, with error feedback; for sgd without momentum."""

    name = "mc"

    momentum: float = Field(
        default=0.9, ge=0, lt=1, description="decay of the velocity, in place of the optimiser's"
    )
    warmup: int = Field(
        default=0, ge=0, description="steps over which the share that is sent falls to the codec's own"
    )

    def misfit(self, member: Any) -> str:
        inner = _bare(member)
        if inner.owed:
            return "it has another memory of what was not sent already"
        if not (inner.sparse and inner.tells):
            return "every element is sent in every step, so momentum in the optimiser is right as it is"
        if why := "" if inner.contracts else unheard(inner):
            return why
        if self.warmup and "ratio" not in type(inner).model_fields:
            return "it has no option ratio, which a warm-up of sparsity could change"
        return ""

    def around(self, member: Any) -> "CorrectedCodec":
        inner = _bare(member)
        return CorrectedCodec(inner=inner, momentum=self.momentum, warmup=self.warmup)


class CorrectedCodec(Around):
    """A sparse codec for velocities, with error feedback."""

    name = "corrected"

    momentum: float = 0.9
    warmup: int = 0
    owed: ClassVar[bool] = True  # type: ignore[override]

    def problems(self, plan: Any, train: Any) -> Iterator[Problem]:
        yield from self.inner.problems(plan, train)
        chosen, where = train.optimiser(), "plan.codec, train.optimizer"
        what = f"codec={plan.codec} sends velocities, and {chosen.name}"
        if chosen.squares:
            why = f"{what} would divide by the root of their squares: they are no gradients"
            yield Problem(
                "P23", why, where, f"--train.optimizer sgd --train.momentum 0, or codec={_without(plan)}+ef"
            )
        elif chosen.crossing is not None:
            why = f"{what} has codecs given its first moment: there would be two momenta"
            yield Problem("P23", why, where, f"codec={_without(plan)}+ef, or --train.optimizer sgd")
        elif getattr(chosen, "momentum", 0.0):
            why = f"{what} has a momentum of {chosen.momentum:g} of its own: there would be two"
            yield Problem("P23", why, f"{where}, train.momentum", "--train.momentum 0")

    def lost(self, dp: int) -> float:
        """A velocity is up to 1 / (1 - momentum) gradients."""
        return (2.0 * self.inner.lost(dp) + 1.0) / (1.0 - self.momentum)

    def work(self, shapes: Sequence[tuple[int, ...]], itemsize: int, dp: int) -> Work:
        nbytes = sum(map(prod, shapes)) * itemsize
        return self.more(self.inner.work(shapes, itemsize, dp), 2 * nbytes, 9 * nbytes)

    def stages(self) -> list[Codec]:
        """The codecs of a warm-up, each for an equal number of steps, and then the codec itself."""
        if not self.warmup:
            return [self.inner]
        last = self.inner.ratio  # type: ignore[attr-defined]
        fall = min(1.0, last / FIRST) ** (1.0 / STAGES)
        ratios = [max(last, FIRST * fall**i) for i in range(STAGES)]
        return [*(self.inner.model_copy(update={"ratio": ratio}) for ratio in ratios), self.inner]

    def bind(self) -> "CorrectedCoder":
        from unisono.codecs._watched import bound

        return CorrectedCoder([bound(codec) for codec in self.stages()], self.momentum, self.warmup)


class CorrectedCoder(AroundCoder):
    """velocity [n], left [n]: of this replica; the sum of velocities that were not sent."""

    def __init__(self, stages: Sequence[Coder], momentum: float, warmup: int) -> None:
        super().__init__(stages[-1], (VELOCITY, LEFT), counts=True)
        self.stages, self.momentum, self.warmup = stages, momentum, warmup

    def exchange(self, grad: "Tensor", shapes: "Sequence[Size]", memory: BucketMemory) -> Exchange:
        velocity, left = memory[VELOCITY], memory[LEFT]
        velocity.mul_(self.momentum).add_(grad)
        left.add_(velocity)
        grad.copy_(left)

        def keep_error(sent: "Tensor") -> None:
            left[: len(sent)].sub_(sent)
            velocity[: len(sent)].masked_fill_(sent != 0, 0.0)

        done = len(self.stages) - 1
        stage = min(done, memory.step * done // self.warmup) if self.warmup else done
        return (yield from hearing(self.stages[stage].exchange(grad, shapes, memory), keep_error))


def _without(plan: Any) -> str:
    return plan.codec.partition("+")[0]


def _bare(member: Any) -> Any:
    """A codec without error feedback that loses nothing, which momentum correction has itself."""
    return member.inner if isinstance(member, FedCodec) and member.beta == 1.0 else member
