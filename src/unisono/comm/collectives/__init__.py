"""How the ranks of a group add up, gather and exchange: algorithms, one a file or folder, chosen by `collective`.

What each of them is, `comm.algorithm` says. An algorithm of sends and receives alone is a `ProgramCollective`.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from unisono.comm.algorithm import COLLECTIVES, Algorithm, Collective, Done, Pending, for_cpus
from unisono.programs.collectives import Program
from unisono.spec.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["COLLECTIVES", "Algorithm", "Collective", "Done", "Pending", "ProgramCollective", "for_cpus"]


class ProgramCollective(Collective, ABC):
    """An algorithm whose operations are programs (`programs.collectives`), played with send and receive between CPUs.

    class Mine(ProgramCollective):
        name = "mine"

        def program(self, op, size, root=0, pieces=1):
            return Program(op, size, ...)
    """

    @abstractmethod
    def program(self, op: str, size: int, root: int = 0, pieces: int = 1) -> Program:
        """The rounds of one of `programs.collectives.OPS` between `size` ranks. root: of a rooted one. pieces: into
        which a long vector may be cut, so that a rank passes one on while the next comes. Raises ValueError for a
        size that it does not serve."""

    def sent(self, op: str, nbytes: int, size: int) -> int:
        """Bytes that the busiest rank sends, of tensors of four bytes an element."""
        whole = nbytes * size if op in ("gather", "all_gather") else nbytes
        return 4 * self.program(op, size).most(whole // 4)

    def bind(self, pg: "ProcessGroup", axis: str) -> "Algorithm":
        from unisono.comm.device import between_cpus
        from unisono.comm.rounds import ProgramAlgorithm

        if not between_cpus(pg):
            raise for_cpus(self.name, axis)
        try:
            self.program("all_reduce", pg.size())
        except ValueError as error:
            what = f"collective={self.name} cannot serve {axis}: {error}"
            raise UsageError(what, where="plan.collective", fix="other options of it", code="P20") from error
        return ProgramAlgorithm(self, pg, self.program)
