"""Groups of ranks along one axis: the collectives that the house uses, with their bytes and time recorded.

A group of one (`size == 1`) answers every call at once and moves nothing, so callers never ask for its size.
Bytes are payload bytes that this rank sends, by the algorithm's own count.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.comm import exchange
from unisono.comm.memory import Meeting, mapped
from unisono.comm.tree import tree_sum
from unisono.observe.span import Recorder


class Pending(Protocol):
    """Something under way; `wait` returns when the result is there."""

    def wait(self) -> object: ...


class Done:
    """The pending operation of a group of one."""

    def wait(self) -> None:
        return None


class Group:
    """The ranks that differ only in their coordinate on `axis`.

    ranks: global ranks in coordinate order. index: this rank's place among them. pg: torch's process group, or
    None for a group of one. ordered: scattered sums follow one tree on every backend, at the cost of the backend's
    own algorithm.
    """

    def __init__(
        self,
        axis: str,
        ranks: Sequence[int],
        index: int,
        pg: dist.ProcessGroup | None,
        recorder: Recorder,
        ordered: bool = False,
    ) -> None:
        self.axis, self.ranks, self.index, self.pg = axis, tuple(ranks), index, pg
        self.size = len(self.ranks)
        self.recorder, self.ordered = recorder, ordered
        self._shared: dict[int, tuple[Tensor, ...]] = {}  # by address: a buffer of every member
        self._near: bool | None = None

    def near(self, device: torch.device) -> bool:
        """Whether `device` is a processor and all ranks are on one host and see each other's memory. A collective."""
        if device.type != "cpu":
            return False
        if self._near is None:
            gloo = self.pg if self.pg is not None and self.pg.name() == "gloo" else None
            self._near = gloo is not None and mapped(gloo, 1, torch.uint8) is not None
        return self._near

    def buffer(self, numel: int, like: Tensor) -> Tensor:
        """Zeros [numel] of the dtype and on the device of `like`. Where all ranks are near, `start_all_reduce` of the
        whole of it sends nothing. A collective."""
        if self.pg is not None and self.near(like.device):
            found = mapped(self.pg, numel, like.dtype)
            if found is not None:
                self._shared[found[self.index].data_ptr()] = found
                return found[self.index]
        return torch.zeros(numel, dtype=like.dtype, device=like.device)

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce x in place over the group; returns x."""
        if self.pg is None:
            return x
        if exchange.reduces(x, op, self.size):
            with self._timed("all_reduce", x.nbytes * (self.size - 1)):
                exchange.reduce_small(x, op, self.pg)
        else:
            with self._timed("all_reduce", x.nbytes * 2 * (self.size - 1) // self.size):
                dist.all_reduce(x, op=op, group=self.pg)
        return x

    def start_all_reduce(self, x: Tensor) -> Pending:
        """As all_reduce, but returns at once; x is ready after `wait`. What meets in memory counts as sent."""
        if self.pg is None:
            return Done()
        self.recorder.count(self.axis, "all_reduce", x.nbytes * 2 * (self.size - 1) // self.size)
        shared = self._shared.get(x.data_ptr())
        if shared is not None and shared[self.index].numel() == x.numel():
            return Meeting(self.pg, shared, self.index, exchange.agreed(self.pg))
        work = dist.all_reduce(x, group=self.pg, async_op=True)
        return work if work is not None else Done()

    def all_gather(self, x: Tensor) -> Tensor:
        """x [n, ...] → [size · n, ...], this group's parts one after the other."""
        if self.pg is None:
            return x
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        self.gather_into(out, x.contiguous())
        return out

    def gather_into(self, out: Tensor, part: Tensor) -> None:
        """As all_gather, into `out`, of which `part` may be this rank's place; both are contiguous."""
        if self.pg is None:
            out.copy_(part)
            return
        with self._timed("all_gather", part.nbytes * (self.size - 1)):
            if part.is_cuda:
                dist.all_gather_single(out, part, group=self.pg)
            else:
                exchange.gather(out, part, self.pg)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """x [size · n, ...] → [n, ...]: this rank's part of the sum, along the tree over the ranks.

        Gloo's own reduce-scatter sends what an all-reduce sends; an exchange of parts sends half of that.
        """
        if self.pg is None:
            return x
        x = x.contiguous()
        part = (x.shape[0] // self.size, *x.shape[1:])
        with self._timed("reduce_scatter", x.nbytes * (self.size - 1) // self.size):
            if x.is_cuda and not self.ordered:
                out = x.new_empty(part)
                dist.reduce_scatter_single(out, x, group=self.pg)
                return out
            parts = torch.empty_like(x)
            self._exchange(parts, x).wait()
        return tree_sum(parts.view(self.size, *part).unbind(0))

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Overwrite x with that of the rank at index `source`."""
        if self.pg is not None:
            with self._timed("broadcast", x.nbytes if self.index == source else 0):
                dist.broadcast(x, src=self.ranks[source], group=self.pg)
        return x

    def barrier(self) -> None:
        """Wait until every rank of the group is here."""
        if self.pg is not None:
            with self.recorder.span("wait", axis=self.axis, op="barrier"):
                dist.barrier(group=self.pg)

    def start_exchange(self, x: Tensor) -> tuple[Tensor, Pending]:
        """x [size · n] → [size, n] after `wait`: part i is what rank i holds of this rank's part."""
        if self.pg is None:
            return x.view(1, -1), Done()
        self.recorder.count(self.axis, "all_to_all", x.nbytes * (self.size - 1) // self.size)
        parts = torch.empty_like(x)
        return parts.view(self.size, -1), self._exchange(parts, x)

    def start_all_gather(self, out: Tensor, part: Tensor) -> Pending:
        """part [n] of every rank → out [size · n] after `wait`."""
        if self.pg is None:
            out.copy_(part)
            return Done()
        self.recorder.count(self.axis, "all_gather", part.nbytes * (self.size - 1))
        if not part.is_cuda:
            return exchange.start_gather(out, part, self.pg)
        work = dist.all_gather_single(out, part, group=self.pg, async_op=True)
        return work if work is not None else Done()

    def start_send(self, x: Tensor, to: int) -> Pending:
        """Send x to the rank at index `to`; x must not change before `wait`."""
        self.recorder.count(self.axis, "send", x.nbytes)
        work = dist.isend(x, self.ranks[to], group=self.pg)
        return work if work is not None else Done()

    def start_recv(self, out: Tensor, source: int) -> Pending:
        """Receive into `out` from the rank at index `source`."""
        work = dist.irecv(out, self.ranks[source], group=self.pg)
        return work if work is not None else Done()

    def _exchange(self, out: Tensor, x: Tensor) -> Pending:
        if self.pg is None:
            return Done()
        if not x.is_cuda and not self.near(x.device):  # on one host Gloo's own is as quick, and wakes fewer
            return exchange.start_exchange(out, x, self.pg)
        work = dist.all_to_all_single(out, x, group=self.pg, async_op=True)
        return work if work is not None else Done()

    def _timed(self, op: str, nbytes: int):
        self.recorder.count(self.axis, op, nbytes)
        return self.recorder.span("comm", axis=self.axis, op=op, exposed=True, bytes=nbytes)
