"""What every algorithm of a group is: `Collective`, its declaration, and `Algorithm`, its live part on one rank.

The declaration has the options and says what an operation sends, without torch. `bind` makes the live part when there
is a process group. Its operations begin at once and end when what they return is waited for. The algorithms themselves
are files or folders in `comm.collectives`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from unisono.comm.tree import tree_sum
from unisono.programs.collectives import ROOTED
from unisono.spec.errors import UsageError
from unisono.spec.family import Family, Member
from unisono.spec.fidelity import Fidelity

if TYPE_CHECKING:
    from torch import Tensor, device
    from torch.distributed import ProcessGroup


class Pending(Protocol):
    """Something under way; `wait` returns when the result is there."""

    def wait(self) -> object: ...


class Once(ABC):
    """A pending operation whose end comes once, however often it is waited for, as with the works of torch's
    collectives. One that failed is waited for again."""

    _over = False

    def wait(self) -> None:
        """Returns when it is over. Raises what the process group raises where a member is gone or late."""
        if not self._over:
            self.end()
            self._over = True

    @abstractmethod
    def end(self) -> None:
        """Bring it to its end."""


class Done:
    """The pending operation that is over."""

    def wait(self) -> None:
        return None


class Several:
    """Several operations under way, as one."""

    def __init__(self, works: Sequence[Pending]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class Collective(Member, ABC):
    """An algorithm's declaration.

    fidelity: of its sums, towards those in the order of the ranks. counted: whether all that it declares leaves as
    messages; what ranks read in each other's memory does not.
    threaded: ranks on threads of one process can have it too.
    """

    fidelity: ClassVar[Fidelity] = Fidelity.ROUNDING
    counted: ClassVar[bool] = True
    threaded: ClassVar[bool] = True

    def sent(self, op: str, nbytes: int, size: int) -> int:
        """Bytes that one of `size` ranks sends in `all_reduce` or `all_to_all` of a tensor of `nbytes` bytes, or in
        `all_gather` of a part of them."""
        return {
            "all_reduce": 2 * nbytes * (size - 1) // size,
            "all_to_all": nbytes * (size - 1) // size,
            "all_gather": nbytes * (size - 1),
        }[op]

    def way(self, op: str, nbytes: int, size: int, later: bool = False) -> "Collective":
        """The collective whose `sent` counts for such an operation between CPUs: itself, but for one that chooses among
        others. later: the caller has other work to do before it waits."""
        return self

    def starter(self, size: int) -> tuple[str, ...]:
        """The beginning of the command line that starts so many ranks between which it can be had; () where threads do.
        Raises UsageError where this machine has none."""
        return ()

    @abstractmethod
    def bind(self, pg: "ProcessGroup", axis: str) -> "Algorithm":
        """The live algorithm of one rank. Every member of the group calls it, or it hangs. Raises UsageError, on all
        ranks alike, where it cannot be had between these ranks."""


def for_cpus(name: str, axis: str) -> UsageError:
    """P20: what ranks on CPUs alone can have is asked for between GPUs."""
    return UsageError(
        f"collective={name} is for ranks on CPUs, and those of {axis} are on GPUs",
        where="plan.collective",
        fix="collective=auto, or collective=engine",
        code="P20",
    )


class Algorithm(ABC):
    """A live algorithm of one rank. Every member of the group calls each method, in one order, or it hangs. Tensors are
    contiguous; where one has a part for each member, the parts lie one after the other. root: a member by its place."""

    def __init__(self, member: Collective, pg: "ProcessGroup") -> None:
        self.member, self.pg = member, pg

    @abstractmethod
    def all_reduce(self, x: "Tensor", op: Any) -> Pending:
        """Begin to reduce x in place. op: torch's ReduceOp."""

    @abstractmethod
    def all_gather(self, out: "Tensor", part: "Tensor", later: bool = False) -> Pending:
        """Begin to bring part [n] of every member into out [size · n], in which `part` may lie at its own place. later:
        the caller has other work to do before it waits."""

    @abstractmethod
    def exchange(self, out: "Tensor", x: "Tensor") -> Pending:
        """Begin to bring into part i of out [size · n] what member i has as this member's part of its x [size · n]."""

    def reduce_scatter(self, out: "Tensor", x: "Tensor") -> None:
        """This member's part of the sum of all x [size · n] into out [n]. As here: along the tree over the ranks."""
        parts = x.new_empty(x.shape)
        self.pick("all_to_all", x).exchange(parts, x).wait()
        out.copy_(tree_sum(parts.view(self.pg.size(), *out.shape).unbind(0)))

    @cached_property
    def rooted(self) -> "Algorithm":
        """The algorithm of operations that begin or end with one member, such as a broadcast. By default a tree."""
        return COLLECTIVES.read("tree").bind(self.pg, "group")

    def broadcast(self, x: "Tensor", root: int) -> Pending:
        """Begin to overwrite x with the root's."""
        return self.rooted.broadcast(x, root)

    def reduce(self, x: "Tensor", root: int, op: Any) -> Pending:
        """Begin to reduce all x into the root's; those of others are used up."""
        return self.rooted.reduce(x, root, op)

    def scatter(self, out: "Tensor", x: "Tensor | None", root: int) -> Pending:
        """Begin to bring part i of the root's x [size · n] into out [n] of member i. Others than the root have no x."""
        return self.rooted.scatter(out, x, root)

    def gather(self, out: "Tensor | None", part: "Tensor", root: int) -> Pending:
        """Begin to bring part [n] of every member into the root's out [size · n]. Others have no out."""
        return self.rooted.gather(out, part, root)

    def sends(self, op: str, x: "Tensor", root: int = 0) -> int:
        """Bytes that this member sends in an operation. x: the whole vector; in a gather and an all-gather its part."""
        if op in ROOTED:
            return self.rooted.sends(op, x, root)
        return self.member.sent("all_to_all" if op == "reduce_scatter" else op, x.nbytes, self.pg.size())

    def buffer(self, numel: int, like: "Tensor") -> "Tensor":
        """Zeros [numel] of the dtype and on the device of `like`, where `all_reduce` of the whole is quickest."""
        return like.new_zeros(numel)

    def lend(self, op: str, numel: int, like: "Tensor") -> "Tensor":
        """Memory [numel] of the dtype and on the device of `like` for one operation, where that is quickest: the output
        of an `all_gather`, in which `part` lies at its own place, or the input of a `reduce_scatter`. Nobody writes
        to it once the operation has begun."""
        return like.new_empty(numel)

    def lends(self, op: str, x: "Tensor") -> bool:
        """Whether such memory is x, the input of a `reduce_scatter`, or around x, the part of an `all_gather`."""
        return False

    def near(self, device: "device") -> bool:
        """Whether sums of whole buffers on `device` are taken in memory that all members see."""
        return False

    def pick(self, op: str, x: "Tensor", later: bool = False) -> "Algorithm":
        """The algorithm that is meant for this operation: itself, but for one that chooses among others."""
        return self

    def settled(self) -> str:
        """What was measured at the start, as a value of `collective=` that measures nothing; "" where nothing was."""
        return ""

    def says(self) -> str:
        """What was taken and why, for the start of a run."""
        return f"{self.member.name}, as asked for"


COLLECTIVES: Family[Collective] = Family(
    "collective", "unisono.comm.collectives", Collective, "plan.collective", ("P04", "P05")
)
