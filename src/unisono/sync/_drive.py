"""Runs the exchanges of several buckets over the replicas at once.

All replicas issue the same operations in one order: the first of each bucket as it comes, during backward; then, when
backward is over, bucket by bucket, the next of each. Nothing is issued where an operation ends, since that comes at
other times on other ranks.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unisono.codecs import BucketMemory, Coder, Deal, Exchange, Gather, Request, Sent, Sum
from unisono.comm.bucket import Bucket
from unisono.comm.device import is_apart
from unisono.comm.group import Group, Pending
from unisono.sync._kept import CodecState
from unisono.sync._sample import ErrorSampler


@dataclass(slots=True)
class _Flight:
    """One bucket's exchange. answer: what its operations under way, `pending`, will have filled; they are none when all
    is over. landed_ns: of its first operation, set by whichever thread completes it, 0 until then."""

    flat: Tensor
    exchange: Exchange
    left_ns: int
    op: str = ""
    pending: tuple[Pending, ...] = ()
    answer: Tensor | tuple[Tensor, ...] | None = None
    landed_ns: int = 0

    def note_landing(self) -> None:
        """Have the time of completion written down; only for steps that are drawn, since it wakes Python once each."""

        def landed(_: object) -> None:
            self.landed_ns = time.perf_counter_ns()

        future = getattr(self.pending[0], "get_future", None) if self.pending else None
        if future is not None:
            future().add_done_callback(landed)


def issued(requests: Sequence[Request], group: Group, codec: str) -> list[tuple[Tensor, Pending, str]]:
    """Begin what a codec asks for: of each request what it will have filled, the operation, its name. codec: under
    which their bytes are counted."""
    group.recorder.codec = codec
    begun = [_begun(request, group) for request in requests]
    group.recorder.codec = ""
    return begun


def _begun(request: Request, group: Group) -> tuple[Tensor, Pending, str]:
    x = request.tensor
    match request:
        case Sum():
            return x, group.start_all_reduce(x), "all_reduce"
        case Gather():
            flat = x.new_empty(group.size * x.numel()) if request.into is None else request.into
            return flat.view(group.size, -1), group.start_all_gather(flat, x), "all_gather"
        case Deal():
            return *group.start_exchange(x), "exchange"


class Drive:
    """The exchanges of one rank's buckets. Every member of the group makes it and calls each of its methods, for the
    same buckets in the same order, or it hangs."""

    def __init__(self, coder: Coder, group: Group, params: Mapping[str, nn.Parameter]) -> None:
        """params: by name, all that may come in a bucket."""
        self.coder, self.group = coder, group
        self.kept, self.sampler = CodecState(coder, params), ErrorSampler(group)
        self._memories: list[BucketMemory] = []  # of each bucket, in the order in which they leave
        self._flights: list[_Flight] = []

    @property
    def state(self) -> dict[str, Tensor]:
        """What the codec keeps: live tensors, which a checkpoint may fill before a first step."""
        return self.kept.state

    def begin(self, bucket: Bucket) -> None:
        """A bucket is full."""
        index = len(self._flights)
        if index == len(self._memories):
            self._memories.append(self.kept.joined(bucket, self.group.index, self.group.size))
        memory = self._memories[index]
        memory.step = int(self.kept.steps)
        if self.coder.loses:
            self.sampler.see(bucket.flat)
        if self.coder.scale is not None or (self.kept.holds and self.coder.loses):
            self._prepare(bucket, memory, self.coder.scale)
        exchange = self.coder.exchange(bucket.flat, [p.shape for p in bucket.params], memory)
        flight = _Flight(bucket.flat, exchange, time.perf_counter_ns())
        self._flights.append(flight)
        self._advance(flight)
        if self.group.recorder.looks and not is_apart(bucket.flat):
            flight.note_landing()

    def finish(self) -> None:
        """Returns when every bucket that was begun holds the sum over the replicas."""
        if not self._flights:
            return
        begun, left = time.perf_counter_ns(), self._flights
        recorder, op = self.group.recorder, self._flights[0].op
        with recorder.span("comm", axis="dp", op=op, exposed=True):
            while left := [flight for flight in left if flight.pending]:
                for flight in left:
                    for pending in flight.pending:
                        pending.wait()
                    self._advance(flight)
        for flight in self._flights:
            hidden_until = min(flight.landed_ns, begun)
            if hidden_until > flight.left_ns:
                recorder.add("comm", flight.left_ns, hidden_until, axis="dp", op=op, exposed=False)
        self._flights = []
        self.kept.end_step()
        self.sampler.compare()

    def _advance(self, flight: _Flight) -> None:
        """Hand over the answer that came, and issue what is asked for next, if anything is."""
        try:
            with torch.no_grad():
                request = flight.exchange.send(flight.answer)
                while isinstance(request, Sent):  # nobody around this codec wanted to know
                    request = flight.exchange.send(None)
        except StopIteration as end:
            flight.pending, flight.answer = (), None
            if end.value.data_ptr() != flight.flat.data_ptr():
                flight.flat.copy_(end.value)
            if self.coder.scale is not None and not self.kept.nothing:
                flight.flat.mul_(self.coder.scale)
            return
        together = request if isinstance(request, tuple) else (request,)
        begun = issued(together, self.group, self.coder.called)
        flight.pending = tuple(pending for _, pending, _ in begun)
        answers = tuple(answer for answer, _, _ in begun)
        flight.answer = answers if isinstance(request, tuple) else answers[0]
        flight.op = flight.op or begun[-1][2]

    def _prepare(self, bucket: Bucket, memory: BucketMemory, scale: Tensor | None) -> None:
        """Let what is not a number on one replica reach all, where steps may be given up, whatever of its gradients the
        codec would have sent; and what is kept of one step for the next is in units that no scale changes."""
        # A device is not waited for. What fills the buffer up stays as it is, since nobody would clear it again.
        bucket.body.masked_fill_(~torch.isfinite(bucket.body).all(), torch.nan)
        if not self.kept.nothing:
            self.kept.hold(memory)
            if scale is not None:
                bucket.flat.div_(scale)
