"""Runs the exchanges of several buckets over the replicas at once.

All replicas issue the same operations in one order: the first of each bucket as it comes, during backward; then, when
backward is over, bucket by bucket, the next of each. Nothing is issued where an operation ends, since that comes at
other times on other ranks.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Size, Tensor

from unisono.codecs import Coder, Deal, Exchange, Gather, Memory, Sum
from unisono.observe.span import Recorder


class Underway(Protocol):
    def wait(self) -> object: ...


class Replicas(Protocol):
    """What is asked of the group; see comm.group.Group."""

    @property
    def size(self) -> int: ...
    @property
    def recorder(self) -> Recorder: ...
    def start_all_reduce(self, x: Tensor) -> Underway: ...
    def start_all_gather(self, out: Tensor, part: Tensor) -> Underway: ...
    def start_exchange(self, x: Tensor) -> tuple[Tensor, Underway]: ...


@dataclass(slots=True)
class _Flight:
    """One bucket's exchange. answer: what its operation under way, `pending`, will have filled; None when all is over.
    landed_ns: of its first operation, set by whichever thread completes it, 0 until then."""

    flat: Tensor
    exchange: Exchange
    left_ns: int
    op: str = ""
    pending: Underway | None = None
    answer: Tensor | None = None
    landed_ns: int = 0


class Drive:
    """The exchanges of one rank's buckets. Every member of the group makes it and calls each of its methods, for the
    same buckets in the same order, or it hangs."""

    def __init__(self, coder: Coder, group: Replicas, params: Mapping[str, Tensor]) -> None:
        """params: by name, all that may come in a bucket."""
        self.coder, self.group = coder, group
        self._kept = {
            f"{name}/{key}": torch.zeros_like(p) for name, p in params.items() for key in coder.keeps
        }
        self._unseen = set(self._kept)  # of parameters that were in no bucket yet
        self._memories: list[Memory] = []  # of each bucket, in the order in which they leave
        self._flights: list[_Flight] = []

    def begin(self, flat: Tensor, names: Sequence[str], shapes: Sequence[Size]) -> None:
        """A bucket is full: parameters of these names and shapes, one after the other, and zeros behind them."""
        index = len(self._flights)
        if index == len(self._memories):
            self._memories.append({key: self._joined(flat, key, names, shapes) for key in self.coder.keeps})
        exchange = self.coder.exchange(flat, shapes, self._memories[index])
        flight = _Flight(flat, exchange, time.perf_counter_ns())
        self._flights.append(flight)
        self._advance(flight)
        if self.group.recorder.keep and flat.device.type == "cpu":
            _note_landing(flight)

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
            del self._kept[key]
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
                flat = x.new_empty(self.group.size * x.numel())
                flight.pending, op = self.group.start_all_gather(flat, x), "all_gather"
                flight.answer = flat.view(self.group.size, -1)
            case Deal():
                (flight.answer, flight.pending), op = self.group.start_exchange(x), "exchange"
        flight.op = flight.op or op

    def _joined(self, flat: Tensor, key: str, names: Sequence[str], shapes: Sequence[Size]) -> Tensor:
        """What is kept of the parameters of a bucket, from now on in one tensor as long as it."""
        whole, at = torch.zeros_like(flat), 0
        for name, shape in zip(names, shapes, strict=True):
            part = whole[at : at + shape.numel()].view(shape)
            self._kept[f"{name}/{key}"] = part.copy_(self._kept[f"{name}/{key}"].view(shape))
            self._unseen.discard(f"{name}/{key}")
            at += shape.numel()
        return whole

    def state(self) -> dict[str, Tensor]:
        """What the codec keeps, by `PARAMETER/NAME`: live tensors, which a checkpoint may fill before a first step."""
        return self._kept


def _note_landing(flight: _Flight) -> None:
    """Have the time of completion written down; only for steps that are drawn, since it wakes Python once each."""

    def landed(_: object) -> None:
        flight.landed_ns = time.perf_counter_ns()

    future = getattr(flight.pending, "get_future", None)
    if future is not None:
        future().add_done_callback(landed)
