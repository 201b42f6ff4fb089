"""The quickest way that these ranks have, operation by operation."""

from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from unisono.comm.collectives import COLLECTIVES, Algorithm, Collective, Pending
from unisono.comm.collectives.engine import Engine
from unisono.comm.collectives.hierarchical import HierarchicalCollective
from unisono.comm.collectives.memory import InMemory, passes
from unisono.comm.collectives.messages import SMALL, Messages
from unisono.programs.collectives import ROOTED, pick
from unisono.programs.collectives.pick import USUAL
from unisono.spec import words
from unisono.spec.finder import contributed

if TYPE_CHECKING:
    from torch import Tensor, device
    from torch.distributed import ProcessGroup

    from unisono.comm.collectives.hierarchical.live import HostsAlgorithm
    from unisono.comm.collectives.memory.live import MemoryAlgorithm


class Auto(Collective):
    """What is quickest between these ranks: memory that all see, messages, or the backend's own."""

    name = "auto"

    measured: bool = Field(
        default=False, description="between hosts: try the programs at the start, take what is quicker"
    )
    by: str = Field(
        default="",
        description="between hosts: what was measured, as direct-65536/ring-1048576 (bytes at most)",
    )

    @field_validator("by")
    @classmethod
    def _known(cls, text: str) -> str:
        for chosen in pick.read(text):
            member = COLLECTIVES.find(chosen.name)
            if issubclass(member, Auto) or not member.counted:
                raise ValueError(f"{chosen.name!r} is no way of messages between hosts")
        return text

    def way(self, op: str, nbytes: int, size: int, later: bool = False) -> Collective:
        if op != "all_reduce" or not (later or nbytes * (size - 1) > SMALL):
            return Messages()
        return COLLECTIVES.read(pick.of(pick.read(self.by), nbytes)) if self.by else Engine()

    def bind(self, pg: "ProcessGroup", axis: str) -> "AutoAlgorithm":
        return AutoAlgorithm(self, pg, axis)


class AutoAlgorithm(Algorithm):
    """Chooses an algorithm for each operation, alike on all ranks.

    GPUs: the engine. CPUs: gathers and small sums by messages. CPUs of one host: whole gradient buffers in memory, and
    whatever is large and waited for at once; smaller exchanges by the engine, which wakes fewer threads and is as quick
    there. Of several hosts: exchanges by messages, and sums of gradients by what was measured, if the plan says so.
    Where each of these has equally many ranks, whole buffers and large sums in memory first, and then between hosts.
    """

    def __init__(self, member: Collective, pg: "ProcessGroup", axis: str) -> None:
        super().__init__(member, pg)
        from unisono.comm.device import between_cpus, is_apart

        self.axis, self._near, self._is_apart = axis, None if between_cpus(pg) else False, is_apart
        self._engine = Engine().bind(pg, axis)
        self._messages = None if self._near is False else Messages().bind(pg, axis)
        self._memory: MemoryAlgorithm | None = None
        self._hosts: HostsAlgorithm | None = None
        self.by = self._measured()
        self._others = {chosen.name: COLLECTIVES.read(chosen.name).bind(pg, axis) for chosen in self.by}

    def _measured(self) -> tuple[pick.Pick, ...]:
        """What sums gradients between hosts, by size."""
        member = self.member
        wanted = isinstance(member, Auto) and (member.by or member.measured)
        if not isinstance(member, Auto) or not wanted or self._messages is None or self.near(_cpu()):
            return ()
        if member.by:
            return pick.read(member.by)
        return contributed("unisono.comm.probe").probe(self.pg)

    def near(self, device: "device") -> bool:
        if self._is_apart(device):
            return False
        if self._near is None:
            from unisono.comm.collectives.hierarchical.live import on_hosts
            from unisono.comm.collectives.memory.live import MemoryAlgorithm, sees_all

            self._near = sees_all(self.pg)
            self._memory = MemoryAlgorithm(InMemory(), self.pg) if self._near else None
            self._hosts = None if self._near else on_hosts(HierarchicalCollective(), self.pg, self.axis)
        return self._near

    def buffer(self, numel: int, like: "Tensor") -> "Tensor":
        self.near(like.device)
        where = None if self._is_apart(like) else self._memory or self._hosts
        return super().buffer(numel, like) if where is None else where.buffer(numel, like)

    def lend(self, op: str, numel: int, like: "Tensor") -> "Tensor":
        if self.near(like.device) and self._memory is not None:
            return self._memory.lend(op, numel, like)
        return super().lend(op, numel, like)

    def lends(self, op: str, x: "Tensor") -> bool:
        return self._memory is not None and self._memory.lends(op, x)

    def pick(self, op: str, x: "Tensor", later: bool = False) -> Algorithm:
        if self._messages is None or self._is_apart(x) or op in ROOTED:
            return self._engine
        if self._memory is not None and op == "all_gather" and self.lends(op, x):
            return self._memory
        if not later and (memory := self._passing(op, x)) is not None:
            return memory
        if op == "all_gather":
            return self._messages
        if op == "reduce_scatter":
            return self  # as an exchange
        if op == "all_to_all":
            return self._engine if self.near(x.device) else self._messages
        if later:
            where = self._memory or self._hosts
            is_usual = pick.of(self.by, x.nbytes) == USUAL
            return where if where is not None and is_usual and where.holds(x) else self._large(x)
        small = x.nbytes * (self.pg.size() - 1) <= SMALL
        return self._messages if small and x.is_contiguous() else self._large(x)

    def _large(self, x: "Tensor") -> Algorithm:
        """What sums a tensor that is no small one and does not lie in memory that all see."""
        name = pick.of(self.by, x.nbytes) if x.is_contiguous() else USUAL
        return self._others.get(name, self._engine)

    def all_reduce(self, x: "Tensor", op: Any) -> Pending:
        return self.pick("all_reduce", x, True).all_reduce(x, op)

    def all_gather(self, out: "Tensor", part: "Tensor", later: bool = False) -> Pending:
        return self.pick("all_gather", part, later).all_gather(out, part, later)

    def exchange(self, out: "Tensor", x: "Tensor") -> Pending:
        return self.pick("all_to_all", x).exchange(out, x)

    def reduce_scatter(self, out: "Tensor", x: "Tensor") -> None:
        by = self.pick("reduce_scatter", x)
        super().reduce_scatter(out, x) if by is self else by.reduce_scatter(out, x)

    def _passing(self, op: str, x: "Tensor") -> "MemoryAlgorithm | HostsAlgorithm | None":
        """What is in memory that all members see, or those of a host, if x lies there or is worth its passing through
        it."""
        if self.lends(op, x):
            return self._memory
        if not passes(op, x):
            return None
        if self.near(x.device):
            return self._memory
        return self._hosts if op in ("all_reduce", "reduce_scatter") else None

    @property
    def rooted(self) -> Algorithm:
        return self._engine

    def settled(self) -> str:
        if not isinstance(self.member, Auto) or not self.member.measured or self._near is not False:
            return ""
        return f"{self.member.name}:by={pick.written(self.by)}" if self.by else self.member.name

    def says(self) -> str:
        if self._messages is None:
            return f"engine ({self.pg.name()}): ranks of {self.axis} are on GPUs"
        if self._near:
            return (
                f"memory for whole buffers and what is large, messages for the rest: ranks of {self.axis} are on one "
                "host and see each other's memory"
            )
        usual = "engine" if self._hosts is None else "hierarchical in memory of each host"
        if self.by:
            picks = ", ".join(f"{chosen.name} to {words.nbytes(chosen.most)}" for chosen in self.by)
            return (
                f"{picks}, {usual} beyond for sums of gradients, messages for the rest: as measured between hosts "
                f"(collective={self.member.name}:by={pick.written(self.by)})"
            )
        if self._hosts is not None:
            return self._hosts.says()
        if self._near is None:
            return "messages for small sums and gathers, engine for the rest: ranks are on CPUs"
        return f"engine for large sums, messages for the rest: ranks of {self.axis} do not see each other's memory"


def _cpu() -> "device":
    from torch import device

    return device("cpu")
