"""What crosses `dp` in place of a gradient: codecs, one a file, chosen by the plan's `codec`.

`Codec` is the declaration: options, traits, fidelity, and what it sends and keeps, without torch. `bind` makes the live
part, a `Coder`, when ranks are there. A coder never touches a group: it is a generator that yields what it wants done.

    def exchange(self, grad, shapes, memory):      # top-k
        values, places = largest(grad)
        everybody = yield Gather(torch.cat([values, places]))
        return added_up(everybody)
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from unisono.spec.family import Family, Member
from unisono.spec.fidelity import Fidelity
from unisono.spec.work import Work

if TYPE_CHECKING:
    from torch import Size, Tensor


@dataclass(frozen=True, slots=True)
class Sum:
    """Add this tensor up over the replicas, in place. The answer is the tensor."""

    tensor: "Tensor"


@dataclass(frozen=True, slots=True)
class Gather:
    """Give this tensor [n] to everybody. The answer is [replicas, n], of the same length on all. into [replicas · n]:
    where it shall lie."""

    tensor: "Tensor"
    into: "Tensor | None" = None


@dataclass(frozen=True, slots=True)
class Deal:
    """Give each replica its part of this tensor [replicas · n]. The answer is [replicas, n]: what each one gave us."""

    tensor: "Tensor"


Request = Sum | Gather | Deal
Exchange = Generator[Request, "Tensor", "Tensor"]
Memory = Mapping[str, "Tensor"]


class Codec(Member, ABC):
    """A codec's declaration.

    fidelity: how close its sum comes to the sum of what it was given. error: of a LOSSY one, the largest norm of what
    is missing from a step's sum, over the norm of the sum. linear: codes may be added up in place of gradients. biased:
    what is decoded differs in the mean from what was encoded, so that it needs error feedback. matrix: it needs each
    parameter in its shape. alone: it means something with dp=1.
    """

    fidelity: ClassVar[Fidelity] = Fidelity.LOSSY
    error: ClassVar[float] = 1.0
    linear: ClassVar[bool] = False
    biased: ClassVar[bool] = False
    matrix: ClassVar[bool] = False
    alone: ClassVar[bool] = False

    @abstractmethod
    def work(self, shapes: Sequence[tuple[int, ...]], itemsize: int, dp: int) -> Work:
        """What one rank sends and keeps in a step for a bucket of parameters with these shapes, of `itemsize` bytes an
        element, on `dp` replicas."""

    @abstractmethod
    def bind(self) -> "Coder":
        """The live codec of one rank."""


class Coder(ABC):
    """A live codec on one rank. keeps: names of what it keeps from step to step, each as long as the gradient."""

    keeps: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def exchange(self, grad: "Tensor", shapes: "Sequence[Size]", memory: Memory) -> Exchange:
        """One bucket in one step. grad [n]: this replica's gradients, one parameter after the other, of which there are
        `shapes`, then perhaps zeros; it may be overwritten. memory: by name, what this replica keeps of the bucket [n],
        zeros before the first step, to be changed in place; a checkpoint keeps it parameter by parameter. Every replica
        yields the same requests in the same order. Returns the sum [n]."""


CODECS: Family[Codec] = Family("codec", "unisono.codecs", Codec, "plan.codec", ("P04", "P05"))
