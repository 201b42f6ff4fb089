"""Groups of ranks along one axis: the collectives that the house uses, with their bytes and time recorded.

A group of one (`size == 1`) answers every call at once and moves nothing, so callers never ask for its size.
Bytes are payload bytes that this rank sends, by the algorithm's own count.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.comm.collectives import Algorithm, Collective, Done, Pending
from unisono.comm.collectives.auto import Auto
from unisono.comm.gone import PeerFailureContext, started
from unisono.observe.span import Recorder

__all__ = ["Done", "Group", "Pending"]


class Group:
    """The ranks that differ only in their coordinate on `axis`.

    ranks: global ranks in coordinate order. index: this rank's place among them. pg: torch's process group, or
    None for a group of one. ordered: scattered sums follow one tree on every backend, at the cost of the backend's
    own algorithm. collective: how its members add up, gather and exchange. apart(): a group of the same members whose
    operations have an order of their own, itself if nobody said how. Every member of the group makes it and calls each
    of its methods, or it hangs.
    """

    def __init__(
        self,
        axis: str,
        ranks: Sequence[int],
        index: int,
        pg: dist.ProcessGroup | None,
        recorder: Recorder,
        ordered: bool = False,
        collective: Collective = Auto(),
    ) -> None:
        self.axis, self.ranks, self.index, self.pg = axis, tuple(ranks), index, pg
        self.size = len(self.ranks)
        self.recorder, self.ordered = recorder, ordered
        self.apart: Callable[[], Group] = lambda: self
        self.algorithm = collective.bind(pg, axis) if pg is not None else None

    def says(self) -> str:
        """How the members add up, gather and exchange, and why so; "" for a group of one."""
        return "" if self.algorithm is None else self.algorithm.says()

    def near(self, device: torch.device) -> bool:
        """Whether buffers on `device` are added up in memory that all ranks see. Every member calls it, or it hangs."""
        return self.algorithm is not None and self.algorithm.near(device)

    def buffer(self, numel: int, like: Tensor) -> Tensor:
        """Zeros [numel], of the dtype and device of `like`. If all ranks are `near`, `start_all_reduce` of the whole
        buffer sends nothing. Every member of the group calls it, or it hangs."""
        return like.new_zeros(numel) if self.algorithm is None else self.algorithm.buffer(numel, like)

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce x in place over the group; returns x."""
        if self.algorithm is not None:
            by = self.algorithm.pick("all_reduce", x)
            with self._timed("all_reduce", by.sends("all_reduce", x), by):
                by.all_reduce(x, op).wait()
        return x

    def start_all_reduce(self, x: Tensor) -> Pending:
        """As all_reduce, but returns at once; x is ready after `wait`. What meets in memory counts as sent."""
        if self.algorithm is None:
            return Done()
        by = self.algorithm.pick("all_reduce", x, True)
        return self._started("all_reduce", by, by.sends("all_reduce", x), by.all_reduce, x, dist.ReduceOp.SUM)

    def all_gather(self, x: Tensor) -> Tensor:
        """x [n, ...] → [size · n, ...], this group's parts one after the other."""
        if self.algorithm is None:
            return x
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        self.gather_into(out, x.contiguous())
        return out

    def gather_into(self, out: Tensor, part: Tensor) -> None:
        """As all_gather, into `out`, of which `part` may be this rank's place; both are contiguous."""
        if self.algorithm is None:
            out.copy_(part)
            return
        by = self.algorithm.pick("all_gather", part)
        with self._timed("all_gather", by.sends("all_gather", part), by):
            by.all_gather(out, part).wait()

    def reduce_scatter(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x [size · n, ...] → [n, ...]: this rank's part of the sum, in `out` if there is one; both are contiguous."""
        if self.algorithm is None:
            return x
        x = x.contiguous()
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:])) if out is None else out
        op = "all_to_all" if self.ordered else "reduce_scatter"
        by = self.algorithm if self.ordered else self.algorithm.pick(op, x)
        scatter = partial(Algorithm.reduce_scatter, by) if self.ordered else by.reduce_scatter
        with self._timed("reduce_scatter", by.sends(op, x), by):
            scatter(out, x)
        return out

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Overwrite x with that of the rank at index `source`."""
        if self.algorithm is not None:
            by = self.algorithm.pick("broadcast", x)
            with self._timed("broadcast", by.sends("broadcast", x, source), by):
                by.broadcast(x, source).wait()
        return x

    def barrier(self) -> None:
        """Wait until every rank of the group is here."""
        if self.pg is not None:
            span = self.recorder.span("wait", axis=self.axis, op="barrier")
            span.call = self.recorder.call(self.axis, "barrier", 0)
            with PeerFailureContext(self.pg, "a barrier", span):
                dist.barrier(group=self.pg)

    def start_exchange(self, x: Tensor) -> tuple[Tensor, Pending]:
        """x [size · n] → [size, n] after `wait`: part i is what rank i holds of this rank's part."""
        if self.algorithm is None:
            return x.view(1, -1), Done()
        by, parts = self.algorithm.pick("all_to_all", x), torch.empty_like(x)
        pending = self._started("all_to_all", by, by.sends("all_to_all", x), by.exchange, parts, x)
        return parts.view(self.size, -1), pending

    def start_all_gather(self, out: Tensor, part: Tensor) -> Pending:
        """part [n] of every rank → out [size · n] after `wait`."""
        if self.algorithm is None:
            out.copy_(part)
            return Done()
        by = self.algorithm.pick("all_gather", part, True)
        return self._started("all_gather", by, by.sends("all_gather", part), by.all_gather, out, part, True)

    def start_send(self, x: Tensor, to: int) -> Pending:
        """Send x to the rank at index `to`; x must not change before `wait`."""
        self.recorder.count(self.axis, "send", x.nbytes)
        return started(self.pg, f"a send to rank {self.ranks[to]}", dist.isend, x, self.ranks[to], self.pg)

    def start_recv(self, out: Tensor, source: int) -> Pending:
        """Receive into `out` from the rank at index `source`."""
        source = self.ranks[source]
        return started(self.pg, f"a receive from rank {source}", dist.irecv, out, source, self.pg)

    def _timed(self, op: str, nbytes: int, by: Algorithm):
        self.recorder.count(self.axis, op, nbytes, by.member.name)
        span = self.recorder.span("comm", axis=self.axis, op=op, exposed=True, bytes=nbytes)
        span.call = self.recorder.call(self.axis, op, nbytes)
        return PeerFailureContext(self.pg, f"{op} over {self.axis}", span)

    def _started(self, op: str, by: Algorithm, nbytes: int, begin: Any, *args: Any) -> Pending:
        """An operation that goes on until it is waited for, counted and logged."""
        self.recorder.count(self.axis, op, nbytes, by.member.name)
        call = self.recorder.call(self.axis, op, nbytes)
        return started(self.pg, f"{op} over {self.axis}", begin, *args, call=call)
