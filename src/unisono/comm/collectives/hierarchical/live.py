"""Sums over several hosts with equally many ranks each: in memory inside a host, and part by part between hosts.

The ranks of a host add up a part each of what all of them have, where it lies. That part meets those of the same place
on the other hosts, so that all ranks of a host send at once and each byte of a sum crosses once. Its sum is written to
all ranks of the host. Buffers of gradients lie in that memory; what is large and lies elsewhere is brought there.

Sums over buffers go on whenever the next one begins, as far as they can without waiting: while backward computes, parts
of earlier buckets are between the hosts. They meet there in the order in which they began, on all ranks alike.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.comm.collectives import Pending
from unisono.comm.collectives.engine import Engine
from unisono.comm.collectives.hierarchical import HierarchicalCollective
from unisono.comm.collectives.memory import passes
from unisono.comm.collectives.memory.live import SharedBuffers, pieces_added
from unisono.comm.collectives.memory.mapping import mapped, part_of
from unisono.comm.collectives.memory.passing import SharedRoom, pieces
from unisono.comm.collectives.messages import SMALL
from unisono.comm.collectives.messages.live import InFlight, agreed, start_exchange, start_small_sum
from unisono.comm.device import between_cpus
from unisono.comm.gone import described, started
from unisono.comm.hosts import nodes_of
from unisono.comm.rounds import ProgramAlgorithm
from unisono.comm.tags import HOSTS
from unisono.comm.tree import tree_sum

_OPS = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN)


@dataclass(slots=True, eq=False)
class HostsMeeting:
    """A sum under way over `buffers`, one for each rank of this host. A pending operation. Each of `there`, `between`
    and `shared` begins where the one before has ended: all gradients are there, this rank's part is between the hosts,
    all parts have come back."""

    by: "HostsAlgorithm"
    buffers: Sequence[Tensor]
    number: int
    there: Any
    between: Any = None
    shared: InFlight | None = None

    def goes_on(self) -> bool:
        """Do what needs no waiting. Whether a later sum may meet the other hosts."""
        if self.between is None and self.there.is_completed():
            self.cross()
        if self.between is not None and self.between.is_completed():
            self.share()
        return self.between is not None

    def cross(self) -> None:
        """Add up this rank's part, and begin to add those of the other hosts to it."""
        if self.between is not None:
            return
        self.there.wait()
        index = self.by.within.rank()
        with torch.no_grad():
            for _ in pieces_added(self.buffers, index):
                pass
        self.between = self.by.across(self.buffers[index][self._part()], dist.ReduceOp.SUM)

    def share(self) -> None:
        """Write the sum of this rank's part to all ranks of the host."""
        if self.shared is not None:
            return
        self.between.wait()
        index, part = self.by.within.rank(), self._part()
        with torch.no_grad():
            for i in range(1, len(self.buffers)):  # the next rank's first
                other = self.buffers[(index + i) % len(self.buffers)]
                other[part].copy_(self.buffers[index][part])
        self.shared = agreed(self.by.within, HOSTS.of(self.number))

    def end(self) -> None:
        """Returns when the sum is in everybody's buffer."""
        self.cross()
        self.by.go_on()
        self.share()
        self.by.go_on()
        if self.shared is not None:
            self.shared.wait()

    def wait(self) -> None:
        """Returns when the sum is in everybody's buffer, the same bits in all. Raises what the groups' collectives
        raise where a member is gone or late."""
        self.by.end(self)

    def _part(self) -> slice:
        return part_of(self.buffers[0].numel(), self.by.within.rank(), len(self.buffers))


@dataclass(slots=True, eq=False)
class _Brought:
    """A sum under way of what lies elsewhere. A pending operation."""

    by: "HostsAlgorithm"
    pending: Pending

    def goes_on(self) -> bool:
        """Nothing goes on until somebody waits, and no later sum may overtake it."""
        return False

    def end(self) -> None:
        self.pending.wait()

    def wait(self) -> None:
        self.by.end(self)


class _NothingBetween:
    """The sum over hosts of a part without elements."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class HostsAlgorithm(ProgramAlgorithm):
    """Buffers, and large sums and scattered sums, in memory first and then between hosts; all else as the program.

    within: the ranks of this host. between: those of the same place on each host.
    """

    def __init__(
        self,
        member: HierarchicalCollective,
        pg: dist.ProcessGroup,
        axis: str,
        within: dist.ProcessGroup,
        between: dist.ProcessGroup,
    ) -> None:
        super().__init__(member, pg, member.program)
        self.axis = axis
        self.within, self.between = within, between
        self._buffers = SharedBuffers(within)
        self._bringing, self._begun = SharedRoom(within), 0
        self._under_way: deque[HostsMeeting | _Brought] = deque()

    def buffer(self, numel: int, like: Tensor) -> Tensor:
        mine = self._buffers.make(numel, like)
        return super().buffer(numel, like) if mine is None else mine

    def says(self) -> str:
        hosts, ranks = self.between.size(), self.within.size()
        return (
            "hierarchical: whole buffers and what is large in memory of each host, then part by part between hosts; "
            f"the rest as messages: {self.axis} has {ranks} ranks on each of {hosts} hosts"
        )

    def holds(self, x: Tensor) -> bool:
        """Whether x is the whole of such a buffer."""
        return bool(self._buffers.around(x))

    def sends(self, op: str, x: Tensor, root: int = 0) -> int:
        hosts, ranks = self.between.size(), self.within.size()
        if op == "all_reduce" and self.holds(x):
            if self._is_small(x):
                return x.nbytes * (self.pg.size() - 1)
            return self._crosses(x.numel()) * x.element_size()
        if op == "all_reduce" and passes(op, x):
            each = (piece.stop - piece.start for piece in pieces(x.view(-1)))
            return sum(map(self._crosses, each)) * x.element_size()
        if op == "reduce_scatter" and passes(op, x):
            return x.nbytes // (hosts * ranks) * (hosts - 1)
        return super().sends(op, x, root)

    def _crosses(self, numel: int) -> int:
        """Elements that this rank sends to other hosts in a sum over so many."""
        part = part_of(numel, self.within.rank(), self.within.size())
        return Engine().sent("all_reduce", part.stop - part.start, self.between.size())

    def _is_small(self, x: Tensor) -> bool:
        return x.nbytes * (self.pg.size() - 1) <= SMALL

    def all_reduce(self, x: Tensor, op: Any) -> Pending:
        if op == dist.ReduceOp.SUM and self.holds(x):
            if self._is_small(x):
                return start_small_sum(x, op, self.pg)
            # A collective, since of a message nobody can say whether it has come without waiting for it.
            there = self.within.allreduce([torch.zeros(1)])
            self._begun += 1
            self._under_way.append(HostsMeeting(self, self._buffers.around(x), self._begun, there))
            self.go_on()
            return self._under_way[-1]
        if op in _OPS and passes("all_reduce", x):
            self._drain()
            begun = self._bringing.all_reduce(x, op, lambda part: self.across(part, op).wait())
            self._under_way.append(_Brought(self, begun))
            return self._under_way[-1]
        return super().all_reduce(x, op)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        if not passes("reduce_scatter", x):
            super().reduce_scatter(out, x)
            return
        self._drain()
        ranks = dist.get_process_group_ranks(self.pg)
        places = [ranks.index(rank) for rank in dist.get_process_group_ranks(self.between)]

        def add(into: Tensor, parts: Tensor) -> None:
            each = torch.empty_like(parts)
            start_exchange(each, parts, self.between).wait()
            into.copy_(tree_sum(each.view(self.between.size(), -1).unbind(0)))

        self._bringing.reduce_scatter_over(out, x, places, add)

    def across(self, x: Tensor, op: Any) -> Any:
        """Begin to reduce x over the hosts, in place."""
        if not x.numel():
            return _NothingBetween()
        return dist.all_reduce(x, op=op, group=self.between, async_op=True)

    def go_on(self) -> None:
        """What is under way, as far as it goes without waiting."""
        for meeting in self._under_way:
            if not meeting.goes_on():
                break

    def end(self, last: HostsMeeting | _Brought) -> None:
        """All that is under way, up to this one, which may be over."""
        while last in self._under_way:
            self._under_way[0].end()
            self._under_way.popleft()

    def _drain(self) -> None:
        if self._under_way:
            self.end(self._under_way[-1])


def on_hosts(member: HierarchicalCollective, pg: dist.ProcessGroup, axis: str) -> HostsAlgorithm | None:
    """None, for all members, unless they are on several hosts, on each as many, which are several and see each other's
    memory. Every member of the group calls it, or it hangs."""
    nodes = nodes_of(pg) if between_cpus(pg) else ()
    if len(nodes) < 2 or len(nodes[0]) < 2 or len({len(node) for node in nodes}) > 1:
        return None
    ranks, timeout = dist.get_process_group_ranks(pg), _timeout_of(pg)
    here = next(node for node in nodes if pg.rank() in node)
    lane = [node[here.index(pg.rank())] for node in nodes]
    groups: list[Any] = [
        dist.new_group(
            [ranks[place] for place in places],
            timeout,
            use_local_synchronization=True,
            group_desc=described(pg),
        )
        for places in (here, lane)
    ]
    sees = torch.tensor([float(mapped(groups[0], 1, torch.uint8) is not None)])
    started(pg, "the making of shared memory", pg.allreduce, [sees]).wait()
    if sees.item() < pg.size():
        return None
    bound = member.model_copy()
    bound._nodes = nodes
    return HostsAlgorithm(bound, pg, axis, *groups)


def _timeout_of(pg: Any) -> Any:
    """How long its operations may take; None where it does not say."""
    with suppress(RuntimeError, AttributeError):
        return pg._get_backend(torch.device("cpu")).options._timeout
    return None
