"""The quickest way that these ranks have, operation by operation."""

from typing import TYPE_CHECKING, Any

from unisono.comm.collectives import Algorithm, Collective, Pending
from unisono.comm.collectives.engine import Engine
from unisono.comm.collectives.memory import InMemory, passes
from unisono.comm.collectives.messages import SMALL, Messages
from unisono.programs.collectives import ROOTED

if TYPE_CHECKING:
    from torch import Tensor, device
    from torch.distributed import ProcessGroup

    from unisono.comm.collectives.memory.live import MemoryAlgorithm


class Auto(Collective):
    """What is quickest between these ranks: memory that all see, messages, or the backend's own."""

    name = "auto"
    nearby = True

    def way(self, op: str, nbytes: int, size: int, later: bool = False) -> Collective:
        return Engine() if op == "all_reduce" and (later or nbytes * (size - 1) > SMALL) else Messages()

    def bind(self, pg: "ProcessGroup", axis: str) -> "AutoAlgorithm":
        return AutoAlgorithm(self, pg, axis)


class AutoAlgorithm(Algorithm):
    """Chooses an algorithm for each operation, alike on all ranks.

    GPUs: the engine. CPUs: gathers and small sums by messages. CPUs of one host: whole gradient buffers in memory, and
    whatever is large and waited for at once; smaller exchanges by the engine, which wakes fewer threads and is as quick
    there. Of several hosts: exchanges by messages.
    """

    def __init__(self, member: Collective, pg: "ProcessGroup", axis: str) -> None:
        super().__init__(member, pg)
        from unisono.comm.device import between_cpus, is_apart

        self.axis, self._near, self._is_apart = axis, None if between_cpus(pg) else False, is_apart
        self._engine = Engine().bind(pg, axis)
        self._messages = None if self._near is False else Messages().bind(pg, axis)
        self._memory: MemoryAlgorithm | None = None

    def near(self, device: "device") -> bool:
        if self._is_apart(device):
            return False
        if self._near is None:
            from unisono.comm.collectives.memory.live import MemoryAlgorithm, sees_all

            self._near = sees_all(self.pg)
            self._memory = MemoryAlgorithm(InMemory(), self.pg) if self._near else None
        return self._near

    def buffer(self, numel: int, like: "Tensor") -> "Tensor":
        if self.near(like.device) and self._memory is not None:
            return self._memory.buffer(numel, like)
        return super().buffer(numel, like)

    def pick(self, op: str, x: "Tensor", later: bool = False) -> Algorithm:
        if self._messages is None or self._is_apart(x) or op in ROOTED:
            return self._engine
        if not later and (memory := self._passing(op, x)) is not None:
            return memory
        if op == "all_gather":
            return self._messages
        if op == "all_to_all":
            return self._engine if self.near(x.device) else self._messages
        if later:
            return self._memory if self._memory is not None and self._memory.holds(x) else self._engine
        small = self.member.way(op, x.nbytes, self.pg.size()) == self._messages.member
        return self._messages if small and x.is_contiguous() else self._engine

    def all_reduce(self, x: "Tensor", op: Any) -> Pending:
        return self.pick("all_reduce", x, True).all_reduce(x, op)

    def all_gather(self, out: "Tensor", part: "Tensor", later: bool = False) -> Pending:
        return self.pick("all_gather", part, later).all_gather(out, part, later)

    def exchange(self, out: "Tensor", x: "Tensor") -> Pending:
        return self.pick("all_to_all", x).exchange(out, x)

    def reduce_scatter(self, out: "Tensor", x: "Tensor") -> None:
        if self._is_apart(x):
            self._engine.reduce_scatter(out, x)
        elif (memory := self._passing("reduce_scatter", x)) is not None:
            memory.reduce_scatter(out, x)
        else:
            super().reduce_scatter(out, x)

    def _passing(self, op: str, x: "Tensor") -> "MemoryAlgorithm | None":
        """What is in memory that all members see, if x is worth its passing through it."""
        return self._memory if passes(op, x) and self.near(x.device) else None

    @property
    def rooted(self) -> Algorithm:
        return self._engine

    def says(self) -> str:
        if self._messages is None:
            return f"engine ({self.pg.name()}): ranks of {self.axis} are on GPUs"
        if self._near:
            return (
                f"memory for whole buffers and what is large, messages for the rest: ranks of {self.axis} are on one "
                "host and see each other's memory"
            )
        if self._near is None:
            return "messages for small sums and gathers, engine for the rest: ranks are on CPUs"
        return f"engine for large sums, messages for the rest: ranks of {self.axis} do not see each other's memory"
