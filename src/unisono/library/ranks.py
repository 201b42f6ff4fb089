"""`job.ranks`: what a script says and asks outside its gradients. One process alone answers itself."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.comm.gone import NamedWork, WorldEnded
from unisono.comm.group import Group, Pending
from unisono.library.exchange import ScalarExchange, from_main, of_each
from unisono.library.explain import explained
from unisono.library.modes import unwatched
from unisono.spec.errors import HangError, UsageError


@final
class PendingMessage:
    """A message under way. Its tensor must not be changed, or read, before `wait`."""

    def __init__(self, pending: Pending, words: str, within: float | None) -> None:
        self._pending, self._words, self._within = pending, words, within

    def wait(self) -> None:
        """Returns when the message is over. Raises HangError (exit 6), naming the other rank, where it is not by its
        deadline, or that rank is gone; the ranks then cannot go on."""
        pending: Any = self._pending
        timed = self._within is not None and isinstance(pending, NamedWork)
        try:
            pending.wait(timedelta(seconds=self._within or 0)) if timed else pending.wait()
        except WorldEnded:
            raise  # ranks on threads, who say themselves who waits for whom
        except RuntimeError as error:
            within = f" within {self._within:g} s" if self._within is not None else ""
            raise HangError(
                f"{self._words}: the other rank was not there{within}",
                where="job.ranks",
                likely=str(error).strip().splitlines()[0][:200],
                fix="see what that rank does at this point; every send needs a recv of the same size and dtype",
            ) from error


def started(group: Group, x: Tensor, peer: int, within: float | None, *, sends: bool) -> PendingMessage:
    """Begin to send x to a rank, or to receive into it. within: seconds that `wait` waits at most; as for all
    collectives of the run if None. Raises UsageError for a rank that is not there."""
    words = f"{'send to' if sends else 'receive from'} rank {peer}"
    if not 0 <= peer < group.size or peer == group.index:
        raise UsageError(
            f"{words}, which is {'this one' if peer == group.index else 'not there'}",
            where="job.ranks",
            fix=f"another rank of {group.size}",
            code="J22",
        )
    if not x.is_contiguous():
        raise UsageError(
            f"{words} of a tensor with gaps", where="job.ranks", fix="x.contiguous()", code="J22"
        )
    begin = group.start_send if sends else group.start_recv
    return PendingMessage(begin(x.detach(), peer), words, within)


_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@final
class Ranks:
    """Every rank calls each of these, but `print` and messages, or the others wait. Values are plain ones, tensors
    and arrays, in lists, tuples and dicts."""

    def __init__(self, exchange: ScalarExchange) -> None:
        self._exchange = exchange
        self.index, self.size = exchange.group.index, exchange.group.size

    @property
    def is_main(self) -> bool:
        return self.index == 0

    def print(self, *words: Any, **options: Any) -> None:
        """Print on the first rank alone."""
        if self.is_main:
            print(*words, **{"file": sys.stdout, "flush": True, **options})

    def wait(self) -> None:
        """Wait until all ranks are here."""
        self._exchange.group.barrier()

    @contextmanager
    def main_first(self) -> Iterator[bool]:
        """The first rank goes through the block, then the others; yields whether this is the first. For what is to be
        made once, such as a file that the others then read."""
        if not self.is_main:
            self.wait()
        try:
            yield self.is_main
        finally:
            if self.is_main:
                self.wait()

    @explained()
    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the value of rank `source`, on every rank."""
        return from_main(value, self._exchange, source)

    @explained()
    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank."""
        return of_each(value, self._exchange)

    @explained()
    def send(self, x: Tensor, to: int, within: float | None = None) -> None:
        """Send a tensor to one rank, which calls `recv`. within: seconds, after which HangError is raised."""
        started(self._exchange.group, x, to, within, sends=True).wait()

    @explained()
    def recv(self, out: Tensor, source: int, within: float | None = None) -> Tensor:
        """Receive what rank `source` sends into `out`, of the same size and dtype, and return it."""
        started(self._exchange.group, out, source, within, sends=False).wait()
        return out

    @explained()
    def isend(self, x: Tensor, to: int, within: float | None = None) -> PendingMessage:
        """Begin to send a tensor, which must not change before `wait()` of what this returns."""
        return started(self._exchange.group, x, to, within, sends=True)

    @explained()
    def irecv(self, out: Tensor, source: int, within: float | None = None) -> PendingMessage:
        """Begin to receive a tensor, which is there after `wait()` of what this returns."""
        return started(self._exchange.group, out, source, within, sends=False)

    def sum(self, value: Any) -> Any:
        """Sum a number over the ranks, or a tensor element by element into a new one."""
        return self._reduced(value, "sum")

    def max(self, value: Any) -> Any:
        return self._reduced(value, "max")

    def min(self, value: Any) -> Any:
        return self._reduced(value, "min")

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on some rank, for early stopping for example."""
        return bool(self.max(int(flag)))

    def all(self, flag: bool) -> bool:
        return bool(self.min(int(flag)))

    @torch.no_grad()
    @unwatched()
    def _reduced(self, value: Any, op: str) -> Any:
        if self.size == 1:
            return value
        if isinstance(value, Tensor):
            return self._exchange.group.all_reduce(value.detach().clone(), _OPS[op])
        kind = torch.int64 if isinstance(value, int) else torch.float64
        line = torch.tensor([value], dtype=kind, device=self._exchange.device)
        return self._exchange.group.all_reduce(line, _OPS[op]).item()


def rows_of(values: Sequence[Any], parts: Sequence[tuple[int, int]]) -> list[Any]:
    """Each rank's list of rows as one list of the global batch. parts: [low, high) of each rank; a rank without samples
    has sent one that does not count."""
    return [row for rows, (low, high) in zip(values, parts, strict=True) for row in rows[: high - low]]
