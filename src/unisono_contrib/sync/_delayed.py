"""The live part of `sync/delayed.py`: gradients of several steps, on their way at once.

During backward each bucket is copied, and the copy departs; the bucket is free for the next step. `lag` steps later the
sum has landed, and becomes the gradient of an update.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unisono.codecs import BucketMemory, Coder, Exchange, Sent, Sum
from unisono.codecs.plain import PlainCoder
from unisono.comm.bucket import Bucket
from unisono.comm.device import is_apart
from unisono.comm.group import Group, Pending
from unisono.spec.errors import UsageError
from unisono.sync import Sync, Verdict
from unisono.sync._drive import issued
from unisono.sync._slots import learning_dense
from unisono_contrib.sync._presence import GradientPresence

COUNT, LOST = "delayed_steps", "delayed_lost"


@dataclass(slots=True)
class _Travel:
    """The exchange of one bucket under way. answer: what `pending` fills. landed_ns: set by whichever thread completes
    it, 0 until then."""

    flat: Tensor
    exchange: Exchange
    answer: Tensor
    pending: Pending
    left_ns: int
    landed_ns: int = 0

    def note_landing(self) -> None:
        """Have the time of completion written down; only for steps that are drawn, since it wakes Python once each."""

        def landed(_: object) -> None:
            self.landed_ns = time.perf_counter_ns()

        future = getattr(self.pending, "get_future", None)
        if future is not None:
            future().add_done_callback(landed)


@dataclass(slots=True)
class _Flight:
    """The gradients of one step. values: by name, like the parameter's master. flats: of each bucket, in the order of
    departure; values lie in them. travels: those that have not landed."""

    values: dict[str, Tensor]
    flats: list[Tensor] = field(default_factory=list)
    travels: list[_Travel] = field(default_factory=list)

    def clear(self) -> None:
        """No parameter has a gradient."""
        self.travels = []
        for value in self.values.values():
            value.zero_()


class DelayedSync(Sync):
    """State: the sums over replicas that wait for their update, by `PARAMETER/flight0` for the oldest and so on; how
    many steps they are of; whether some were lost on their way.

    A parameter that has no gradient in a step has one of zeros on its way, and no update by it."""

    shares = sliced = True

    def __init__(self, slots: Sequence[Any], dp: Group, coder: Coder | None, lag: int) -> None:
        self.dp, self.coder, self.lag = dp, coder or PlainCoder(), lag
        self.cap = self.coder.cap
        if self.coder.keeps or self.coder.counts:
            what = "sync=delayed sends a step's gradients before the last ones have landed, and what crosses dp here"
            fix = "codec=plain, another train.optimizer, or sync=every_step"
            where = "plan.sync, plan.codec, train.optimizer"
            raise UsageError(f"{what} is kept from step to step", where=where, fix=fix, code="P21")
        self._slots = learning_dense(slots, "delayed")
        self._names = {id(p): slot.name for slot in self._slots for p in (slot.live, slot.master)}
        self._flights = deque(self._flight() for _ in range(lag))  # the oldest first
        self._spare = [self._flight()]
        self._count, self._lost = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)
        self._new: _Flight | None = None
        self._exposed, self._presence = 0.0, GradientPresence()

    def _flight(self) -> _Flight:
        return _Flight({s.name: torch.zeros_like(s.master, dtype=s.master.grad_dtype) for s in self._slots})

    def among(
        self, world: Group, replica: Group | None = None, counted: frozenset[str] = frozenset()
    ) -> None:
        names, like = [slot.name for slot in self._slots], torch.empty(0, device=self._device)
        self._presence = GradientPresence.among(names, replica, like)

    # Departure.

    @torch.no_grad()
    def grad_ready(self, bucket: Bucket) -> None:
        if self.dp.size == 1:
            return
        flight = self._departing()
        flat = self._flat(flight, len(flight.travels), bucket)
        flat.copy_(bucket.flat)
        memory = BucketMemory(place=self.dp.index, replicas=self.dp.size, seed=self.coder.seed)
        exchange = self.coder.exchange(flat, [p.shape for p in bucket.params], memory)
        request = exchange.send(None)
        while isinstance(request, Sent):
            request = exchange.send(None)
        if not isinstance(request, Sum):
            raise TypeError("a codec that is elementwise asks for one sum")
        left = time.perf_counter_ns()
        ((answer, pending, _),) = issued([request], self.dp, self.coder.called)
        flight.travels.append(_Travel(flat, exchange, answer, pending, left))
        if self.dp.recorder.looks and not is_apart(flat):
            flight.travels[-1].note_landing()

    def _departing(self) -> _Flight:
        """The flight of the step under way."""
        if self._new is None:
            self._new = self._spare.pop()
        return self._new

    def _flat(self, flight: _Flight, at: int, bucket: Bucket) -> Tensor:
        """Where this flight has the bucket that departs as number `at`. Values lie there from the first time on."""
        if at == len(flight.flats):
            flat, begin = torch.zeros_like(bucket.flat), 0
            for p, view in zip(bucket.params, bucket.views, strict=True):
                name = self._names[id(p)]
                value = flat[begin : begin + p.numel()].view_as(view)
                flight.values[name] = value.view_as(flight.values[name])
                begin += p.numel()
            flight.flats.append(flat)
        return flight.flats[at]

    def lacking(self, absent: Sequence[Any]) -> Sequence[Any]:
        """None: zeros are on their way for it."""
        return ()

    # Landing.

    def settle(self) -> Verdict:
        """The gradients of this step are on their way; those of `lag` steps before become the gradients here."""
        with torch.no_grad():
            new = self._departing()
            if self.dp.size == 1:
                for slot in self._slots:
                    grad, value = slot.master.grad, new.values[slot.name]
                    value.zero_() if grad is None else value.copy_(grad)
            self._flights.append(new)
            self._new = None
            oldest = self._flights.popleft()
            begun = time.perf_counter()
            self._arrive(oldest)
            self._exposed = time.perf_counter() - begun
            is_due = int(self._count) == self.lag
            self._bring(oldest) if is_due else self._drop()
            self._spare.append(oldest)
        self._count += not is_due
        return Verdict.APPLY if is_due else Verdict.LATER

    def _arrive(self, flight: _Flight) -> None:
        """Wait for all that is on its way of a step."""
        recorder, now_ns = self.dp.recorder, time.perf_counter_ns()
        for travel in flight.travels:
            with recorder.span("comm", axis="dp", op="all_reduce", exposed=True):
                travel.pending.wait()
            if (until := min(travel.landed_ns, now_ns)) > travel.left_ns:
                recorder.add("comm", travel.left_ns, until, axis="dp", op="all_reduce", exposed=False)
            try:
                travel.exchange.send(travel.answer)
            except StopIteration as end:
                if end.value.data_ptr() != travel.flat.data_ptr():
                    travel.flat.copy_(end.value)
        flight.travels = []

    def _bring(self, flight: _Flight) -> None:
        """The values of a flight into the gradients; zeros are no gradient."""
        there = self._presence.nonzero(flight.values)
        for slot in self._slots:
            value = flight.values[slot.name]
            if slot.name not in there:
                slot.drop_gradient()
            elif slot.master.grad is None:
                slot.master.grad = value.clone()
            else:
                slot.master.grad.copy_(value)

    def _drop(self) -> None:
        for slot in self._slots:
            slot.drop_gradient()

    def next_gradient(self) -> bool:
        if not int(self._count):
            return False
        with torch.no_grad():
            oldest = self._flights[self.lag - int(self._count)]
            self._arrive(oldest)
            self._bring(oldest)
            oldest.clear()
        self._count -= 1
        return True

    def undone(self) -> None:
        """The gradient of a step that is discarded, and the one that it was to apply, are both given up: which of them
        was bad is not known."""
        newest = self._flights.pop()
        with torch.no_grad():
            self._arrive(newest)
            newest.clear()
        self._flights.appendleft(newest)
        self._count -= 1

    # What is kept.

    @torch.no_grad()
    def await_transfers(self) -> None:
        """Every replica calls it where no rank was lost. Where a sum cannot arrive since one was, it is given up."""
        for flight in self._flights:
            try:
                self._arrive(flight)
            except Exception:  # of whatever kind: a peer has gone, and its error is raised elsewhere
                self._lost.fill_(1)
        if int(self._lost):
            for flight in self._flights:
                flight.clear()

    def agree(self) -> None:
        """Where some of what was on its way was lost on one replica, it is lost on all."""
        lost = self.dp.all_gather(self._lost.view(1).to(self._device)) if self.dp.size > 1 else self._lost
        if bool(lost.any()):
            for flight in self._flights:
                flight.clear()
        self._lost.zero_()

    @property
    def _device(self) -> torch.device:
        return self._slots[0].master.device if self._slots else torch.device("cpu")

    def adds(self, key: str) -> bool:
        return "/flight" in key

    def state(self) -> Mapping[str, Tensor]:
        flights = enumerate(self._flights)
        kept = {f"{name}/flight{i}": x for i, flight in flights for name, x in flight.values.items()}
        return {**kept, COUNT: self._count, LOST: self._lost}

    def metrics(self) -> Mapping[str, Any]:
        """landing_s: seconds that this rank waited for what was on its way."""
        return {"landing_s": round(self._exposed, 6)} if self.dp.size > 1 else {}
