"""What crosses `dp` in place of a gradient: codecs, one a file, chosen by the plan's `codec`.

`Codec` is the declaration: options, traits, fidelity, and what it sends and keeps, without torch. `bind` makes the live
part, a `Coder`, when ranks are there. A coder never touches a group: it is a generator that yields what it wants done.

    def exchange(self, grad, shapes, memory):      # top-k
        values, places = largest(grad)
        everybody = yield Gather(torch.cat([values, places]))
        yield Sent(lambda: spread(values, places))  # for error feedback
        return added_up(everybody)

What stands around a codec, such as error feedback in `topk:ratio=0.01+ef`, is a `Mark` in `codecs/_marks/`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from unisono.spec.errors import Problem
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


@dataclass(frozen=True, slots=True)
class Sent:
    """Not an operation: says which part of its own `grad` this replica has brought into the sum. The answer is None.

    decoded() [n], or shorter where zeros follow: called at once or never, only if somebody keeps what was not sent.
    What all replicas decode adds up to the sum that `exchange` returns, but for rounding; so whoever rounds a sum once
    more counts that as its own.
    """

    decoded: Callable[[], "Tensor"]


Request = Sum | Gather | Deal
Requests = Request | tuple[Request, ...] | Sent
"""Several operations in a tuple begin at once, and the answer is a tuple too."""
Exchange = Generator[Requests, Any, "Tensor"]


@dataclass(slots=True)
class BucketMemory(Mapping[str, "Tensor"]):
    """What a replica has beside the gradients of a bucket. `memory["left"]` [n] is what it keeps under that name.

    kept: by name, as `Coder.keeps` lists them. alike: of each parameter, what `Coder.alike` made, which all replicas
    change alike. names: of the parameters, the same under every plan. step: how many exchanges there were before, alike
    on all replicas; a checkpoint keeps it where the coder `counts`. seed: of the run. place, replicas: which one of how
    many this is. Whatever must be drawn alike depends on seed, step and name, never on place.
    """

    kept: Mapping[str, "Tensor"] = field(default_factory=dict)
    alike: Sequence[Mapping[str, "Tensor"]] = ()
    names: tuple[str, ...] = ()
    step: int = 0
    seed: int = 0
    place: int = 0
    replicas: int = 1

    def __getitem__(self, key: str) -> "Tensor":
        return self.kept[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.kept)

    def __len__(self) -> int:
        return len(self.kept)


Memory = BucketMemory


class Codec(Member, ABC):
    """A codec's declaration.

    fidelity: how close its sum comes to the sum of what it was given. error: of a LOSSY one, the largest norm of what
    is missing from a step's sum, over the norm of the sum. linear: codes may be added up in place of gradients. biased:
    what is decoded differs in the mean from what was encoded, so that it needs error feedback. matrix: it needs each
    parameter in its shape. alone: it means something with dp=1. tells: its coder yields `Sent`, so that error feedback
    can stand around it. owed: it keeps what it did not send. sparse: it sends few elements, and these nearly as they
    are. diverges: without error feedback, training under it may end nowhere. contracts: what a replica misses is less
    than what it was given, so that what error feedback keeps stays bounded. checked: what is gathered or dealt and
    arrives damaged is an error (U-G03) on who receives it. elementwise: it asks for one sum and keeps nothing, and each
    element of what it gives depends on that element alone: so gradients may be cut anywhere. varies: how much a
    replica tells the others depends on its gradient.
    """

    fidelity: ClassVar[Fidelity] = Fidelity.LOSSY
    error: ClassVar[float] = 1.0
    linear: ClassVar[bool] = False
    biased: ClassVar[bool] = False
    matrix: ClassVar[bool] = False
    alone: ClassVar[bool] = False
    tells: ClassVar[bool] = False
    owed: ClassVar[bool] = False
    sparse: ClassVar[bool] = False
    diverges: ClassVar[bool] = False
    checked: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    varies: ClassVar[bool] = False

    @property
    def rungs(self) -> "Mapping[str, Codec]":
        """Of a codec that is chosen by measuring: those among which it is, as a plan names them, the least lossy
        first."""
        return {}

    def taken(self, seconds: "Sequence[float]") -> int:
        """Which of `rungs` is taken where a step takes so many seconds with each."""
        return 0

    @property
    def contracts(self) -> bool:
        """As far as `error` tells; who knows better says so."""
        return self.error <= 1.0

    def lost(self, dp: int) -> float:
        """`error` with these options on `dp` replicas, for the proof: of each parameter, the largest error of an
        element over the largest element."""
        return self.error

    def problems(self, plan: Any, train: Any) -> Iterator[Problem]:
        """What of a plan and a recipe's [train] section this codec cannot be played with."""
        yield from ()

    @abstractmethod
    def work(self, shapes: Sequence[tuple[int, ...]], itemsize: int, dp: int) -> Work:
        """What one rank sends and keeps in a step for a bucket of parameters with these shapes, of `itemsize` bytes an
        element, on `dp` replicas."""

    @abstractmethod
    def bind(self) -> "Coder":
        """The live codec of one rank."""


class Coder(ABC):
    """A live codec on one rank. called: as the plan names it, for the ledger of bytes. keeps: names of what it keeps
    from step to step, each as long as the gradient. counts: it asks which step it is. seed: of the run, set before the
    first exchange. scale: what losses and so gradients are multiplied by, None for one. cap: bytes of gradients that
    one exchange has at best between hosts, 0: as many as one likes. Where several are under way, one is encoded or
    decoded while another one travels. loses: what it gives is not the sum, so that its error is sampled. rungs: of one
    that plays one of several, their names and coders."""

    called: str = ""
    loses: bool = False
    rungs: "Sequence[tuple[str, Coder]]" = ()
    keeps: Sequence[str] = ()
    counts: bool = False
    seed: int = 0
    scale: "Tensor | None" = None
    cap: int = 0

    def alike(self, name: str, like: "Tensor") -> "Mapping[str, Tensor]":
        """What all replicas keep alike of one parameter, by name, of any shape, as it is before the first step. like:
        the parameter on this rank. A checkpoint keeps it; where another layout cuts the parameter otherwise, it begins
        anew."""
        return {}

    @abstractmethod
    def exchange(self, grad: "Tensor", shapes: "Sequence[Size]", memory: BucketMemory) -> Exchange:
        """One bucket in one step. grad [n]: this replica's gradients, one parameter after the other, of which there are
        `shapes`, then perhaps zeros; it may be overwritten. memory: what this replica keeps of the bucket, zeros before
        the first step, to be changed in place; a checkpoint keeps it parameter by parameter. With another dp, what all
        replicas kept under one name is added up, and each one gets an equal share. Every replica yields the same
        requests in the same order. Returns the sum [n]."""


CODECS: Family[Codec] = Family(
    "codec", "unisono.codecs", Codec, "plan.codec", ("P04", "P05"), marks="unisono.codecs._marks"
)
