"""Runs the exchanges of several buckets over the replicas at once.

All replicas issue the same operations in one order: the first of each bucket as it comes, during backward; then, when
backward is over, bucket by bucket, the next of each. Nothing is issued where an operation ends, since that comes at
other times on other ranks.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unisono.codecs import Coder, Deal, Exchange, Gather, Memory, Sum
from unisono.comm.bucket import Bucket
from unisono.comm.device import is_apart
from unisono.comm.group import Group, Pending


@dataclass(slots=True)
class _Flight:
    """One bucket's exchange. answer: what its operation under way, `pending`, will have filled; None when all is over.
    landed_ns: of its first operation, set by whichever thread completes it, 0 until then."""

    flat: Tensor
    exchange: Exchange
    left_ns: int
    op: str = ""
    pending: Pending | None = None
    answer: Tensor | None = None
    landed_ns: int = 0

    def note_landing(self) -> None:
        """Have the time of completion written down; only for steps that are drawn, since it wakes Python once each."""

        def landed(_: object) -> None:
            self.landed_ns = time.perf_counter_ns()

        future = getattr(self.pending, "get_future", None)
        if future is not None:
            future().add_done_callback(landed)


class Drive:
    """The exchanges of one rank's buckets. Every member of the group makes it and calls each of its methods, for the
    same buckets in the same order, or it hangs."""

    def __init__(self, coder: Coder, group: Group, params: Mapping[str, nn.Parameter]) -> None:
        """params: by name, all that may come in a bucket.

        state: what the codec keeps, by `PARAMETER/NAME`: live tensors, which a checkpoint may fill before a first step.
        """
        self.coder, self.group = coder, group
        self._names = {id(p): name for name, p in params.items()}
        self.state = {
            f"{name}/{key}": torch.zeros_like(p) for name, p in params.items() for key in coder.keeps
        }
        self._unseen = set(self.state)  # of parameters that were in no bucket yet
        self._memories: list[Memory] = []  # of each bucket, in the order in which they leave
        self._flights: list[_Flight] = []

    def begin(self, bucket: Bucket) -> None:
        """A bucket is full."""
        index = len(self._flights)
        if index == len(self._memories):
            self._memories.append({key: self._joined(bucket, key) for key in self.coder.keeps})
        shapes = [p.shape for p in bucket.params]
        exchange = self.coder.exchange(bucket.flat, shapes, self._memories[index])
        flight = _Flight(bucket.flat, exchange, time.perf_counter_ns())
        self._flights.append(flight)
        self._advance(flight)
        if self.group.recorder.keep and not is_apart(bucket.flat):
            flight.note_landing()

    def finish(self) -> None:
        """Returns when every bucket that was begun holds the sum over the replicas."""
        if not self._flights:
            return
        begun, left = time.perf_counter_ns(), self._flights
        recorder, op = self.group.recorder, self._flights[0].op
        with recorder.span("comm", axis="dp", op=op, exposed=True):
            while left := [flight for flight in left if flight.pending is not None]:
                for flight in left:
                    flight.pending.wait()  # type: ignore[union-attr]
                    self._advance(flight)
        for flight in self._flights:
            hidden_until = min(flight.landed_ns, begun)
            if hidden_until > flight.left_ns:
                recorder.add("comm", flight.left_ns, hidden_until, axis="dp", op=op, exposed=False)
        self._flights = []
        for key in self._unseen:  # as of aliases, which travel with their owners
            del self.state[key]
        self._unseen = set()

    def _advance(self, flight: _Flight) -> None:
        """Hand over the answer that came, and issue the next operation, if there is one."""
        try:
            with torch.no_grad():
                request = flight.exchange.send(flight.answer)  # type: ignore[arg-type]
        except StopIteration as end:
            flight.pending = flight.answer = None
            if end.value.data_ptr() != flight.flat.data_ptr():
                flight.flat.copy_(end.value)
            return
        x = request.tensor
        match request:
            case Sum():
                flight.answer, flight.pending, op = x, self.group.start_all_reduce(x), "all_reduce"
            case Gather():
                flat = x.new_empty(self.group.size * x.numel()) if request.into is None else request.into
                flight.pending, op = self.group.start_all_gather(flat, x), "all_gather"
                flight.answer = flat.view(self.group.size, -1)
            case Deal():
                (flight.answer, flight.pending), op = self.group.start_exchange(x), "exchange"
        flight.op = flight.op or op

    def _joined(self, bucket: Bucket, key: str) -> Tensor:
        """What is kept of the parameters of a bucket, from now on in one tensor as long as it."""
        whole, at = torch.zeros_like(bucket.flat), 0
        for p in bucket.params:
            name = f"{self._names[id(p)]}/{key}"
            self.state[name] = whole[at : at + p.numel()].view(p.shape).copy_(self.state[name])
            self._unseen.discard(name)
            at += p.numel()
        return whole
