"""The live part of `sync/priority.py`: slices that depart in one agreed order, and land in it.

During backward slices depart by a timetable, which was settled from measured times, a few at once. When backward is
over, ranks agree how far any of them has come in it. What is left departs at once, by its turn in the next forward.
"""

import heapq
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

import torch
from torch import Tensor

from unisono.codecs import BucketMemory, Coder, Exchange, Sent, Sum
from unisono.codecs.plain import PlainCoder
from unisono.comm.bucket import Bucket
from unisono.comm.device import has_numbers
from unisono.comm.group import Group, Pending
from unisono.spec.errors import UsageError
from unisono.sync import Sync, Verdict
from unisono.sync._drive import issued
from unisono.sync._link import measured_link

MEASURED = 1  # of the steps, from 0, that whose gradients' times settle the order; the first one makes memory


@dataclass(slots=True)
class GradientSlice:
    """One slice. flat [n]: its part of the bucket. urgent: its turn in the next forward. limit: slices that may be
    under way with it. answer: what its sum fills; None: it has not departed. landed_ns: when it was seen to be over."""

    bucket: Bucket
    flat: Tensor
    urgent: int
    name: str
    limit: float
    ready: bool = False
    exchange: Exchange | None = None
    pending: Pending | None = None
    answer: Tensor | None = None
    left_ns: int = 0
    landed_ns: int = 0

    def is_over(self) -> bool:
        """Whether its sum is known to be there; one that cannot say is not."""
        is_completed = getattr(_work(self.pending), "is_completed", None)
        return is_completed is not None and is_completed()


@dataclass(slots=True)
class ReadyTimes:
    """When buckets were full, in the order in which they were announced: seconds from the start of backward."""

    begun: float = 0.0
    at: dict[int, float] = field(default_factory=dict)


class PrioritySync(Sync):
    """Sums over `dp`, slice by slice. ahead: `settle` may return before all is there; then `land` waits for a part.

    All members of the group announce the same buckets, and hand over the same ones in every step, or it hangs.
    """

    sliced = overlaps = True

    def __init__(self, dp: Group, coder: Coder | None, cap: int, window: int) -> None:
        self.dp, self.coder, self.cap = dp, coder or PlainCoder(), cap
        if self.coder.keeps or self.coder.counts:
            what = "sync=priority cuts gradients anywhere, and what crosses dp here is kept from step to step"
            fix = "codec=plain, another train.optimizer, or sync=every_step"
            raise UsageError(what, where="plan.sync, plan.codec, train.optimizer", fix=fix, code="P21")
        # How many slices have departed when other operations begin is each rank's own affair.
        self.wire = dp.apart()
        self.window = window if self.wire is not dp else inf
        self.ahead = False
        self._timetable: list[GradientSlice] = []
        self._order: list[GradientSlice] = []  # of this step
        self._of: dict[int, list[GradientSlice]] = {}  # by bucket
        self._times, self._steps, self._planned = ReadyTimes(), 0, False
        self._gone = self._over = self._landed = 0

    def announce(self, buckets: Sequence[tuple[Bucket, int, str]]) -> None:
        """All buckets there are, in the order in which backward fills them: each with its turn in forward and a name.
        In a step that is not `ahead` their times are taken, and settle the order of departure."""
        for bucket, urgent, name in buckets:
            self._add(bucket, urgent, name)
        self._planned = len(self._timetable) > 1

    def _add(self, bucket: Bucket, urgent: int, name: str) -> None:
        parts = bucket.flat.split(max(1, self.cap // bucket.flat.itemsize))
        names = [name] if len(parts) == 1 else [f"{name}[{i}]" for i in range(len(parts))]
        self._of[id(bucket)] = [
            GradientSlice(bucket, part, urgent, label, self.window)
            for part, label in zip(parts, names, strict=True)
        ]
        self._timetable += self._of[id(bucket)]
        self._order = list(self._timetable)

    @property
    def measures(self) -> bool:
        """Whether the times of this step settle the order, so that it may not be left unfinished."""
        return self._planned and self._steps == MEASURED

    def begin(self) -> None:
        """The step's last backward begins, and all slices of the step before have landed."""
        self._times = ReadyTimes(time.perf_counter())

    def grad_ready(self, bucket: Bucket) -> None:
        if self.dp.size == 1:
            return
        if id(bucket) not in self._of:
            self._add(bucket, 0, "")
        for piece in self._of[id(bucket)]:
            piece.ready = True
        self._times.at[id(bucket)] = time.perf_counter() - self._times.begun
        self._depart()

    def settle(self) -> Verdict:
        """What is left departs: nothing more urgent can come."""
        if self.ahead:
            self._resort()
        self._depart(at_once=True)
        if not self.ahead:
            self.land(self._gone)
            if self.measures:
                self._agree()
        self._steps += 1
        return Verdict.REMOTE if self.ahead else Verdict.APPLY

    def _resort(self) -> None:
        """By turn in forward, all that no rank has let depart. Every member of `dp` calls it, or it hangs."""
        departed = self._order[0].flat.new_tensor([[self._gone]], dtype=torch.int64)
        gone = int(self.dp.all_gather(departed).max())
        self._order[gone:] = sorted(self._order[gone:], key=lambda piece: piece.urgent)

    def _depart(self, at_once: bool = False) -> None:
        while self._gone < len(self._order):
            piece = self._order[self._gone]
            if not piece.ready or not (at_once or self._under_way() < piece.limit):
                return
            self._start(piece)
            self._gone += 1

    def _under_way(self) -> int:
        while self._over < self._gone and self._order[self._over].is_over():
            piece = self._order[self._over]
            piece.landed_ns = piece.landed_ns or time.perf_counter_ns()
            self._over += 1
        return self._gone - self._over

    @torch.no_grad()
    def _start(self, piece: GradientSlice) -> None:
        memory = BucketMemory(place=self.dp.index, replicas=self.dp.size, seed=self.coder.seed)
        piece.exchange = self.coder.exchange(piece.flat, [piece.flat.shape], memory)
        request = piece.exchange.send(None)
        while isinstance(request, Sent):
            request = piece.exchange.send(None)
        if not isinstance(request, Sum):
            raise TypeError("a codec that is elementwise asks for one sum")
        piece.left_ns, piece.landed_ns = time.perf_counter_ns(), 0
        ((piece.answer, piece.pending, _),) = issued([request], self.wire, self.coder.called)
        future = getattr(_work(piece.pending), "get_future", None)
        if self.dp.recorder.looks and future is not None and piece.flat.is_cpu:

            def landed(_: object) -> None:
                piece.landed_ns = piece.landed_ns or time.perf_counter_ns()

            future().add_done_callback(landed)

    def until(self, buckets: Sequence[Bucket]) -> int:
        """How many slices have to land, in their order, before all of these buckets are there."""
        wanted = {id(piece) for bucket in buckets for piece in self._of.get(id(bucket), ())}
        return 1 + max((at for at, entry in enumerate(self._order) if id(entry) in wanted), default=-1)

    def land(self, count: int) -> list[Bucket]:
        """Wait for the first `count` slices that departed in this step; more are taken if they are over. Returns the
        buckets that are whole now and were not before."""
        before = self._landed
        while self._landed < self._gone:
            piece = self._order[self._landed]
            over, asked_ns = piece.is_over(), time.perf_counter_ns()
            if not over and self._landed >= count:
                break
            if over:
                _wait(piece.pending)
            else:
                with self.dp.recorder.span(
                    "comm", axis="dp", op="all_reduce", exposed=True, slice=piece.name
                ):
                    _wait(piece.pending)
            piece.landed_ns = piece.landed_ns or time.perf_counter_ns()
            self._arrived(piece, min(piece.landed_ns, asked_ns))
            self._landed += 1
        new = self._order[before : self._landed]
        if self._landed == self._gone:
            self._gone = self._over = self._landed = 0
            self._order = list(self._timetable)
        landed = {id(piece.bucket): piece.bucket for piece in new}
        return [bucket for key, bucket in landed.items() if not any(part.pending for part in self._of[key])]

    @torch.no_grad()
    def _arrived(self, piece: GradientSlice, until_ns: int) -> None:
        """Take the sum over from the codec. Until then it went beside other work, from when the link was free."""
        if piece.exchange is None or piece.answer is None:
            raise RuntimeError("a slice lands that has not departed")
        try:
            piece.exchange.send(piece.answer)
        except StopIteration as end:
            if end.value.data_ptr() != piece.flat.data_ptr():
                piece.flat.copy_(end.value)
        free_ns = self._order[self._landed - 1].landed_ns if self._landed else 0
        begun_ns, tags = (
            max(piece.left_ns, free_ns),
            {"axis": "dp", "op": "all_reduce", "slice": piece.name},
        )
        if until_ns > begun_ns:
            self.dp.recorder.add("comm", begun_ns, until_ns, exposed=False, **tags)
        piece.exchange = piece.pending = piece.answer = None
        piece.ready = False

    def _agree(self) -> None:
        """One order for all ranks: from when the last rank had each bucket, and what the link takes for a slice."""
        device = self._timetable[0].flat.device
        if not has_numbers(device):
            return
        times = [self._times.at.get(id(piece.bucket), 0.0) for piece in self._timetable]
        all_times = torch.tensor([times], dtype=torch.float64, device=device)
        ready = self.dp.all_gather(all_times).max(0).values.tolist()
        before, rate = measured_link(self.wire, device, max(piece.flat.nbytes for piece in self._timetable))
        seconds = [before + piece.flat.nbytes / rate for piece in self._timetable]
        urgent = [piece.urgent for piece in self._timetable]
        settled, known = timetable(ready, seconds, urgent, self.window), self._timetable
        self._timetable = [replace(known[i], limit=limit) for i, limit in settled]
        for pieces in self._of.values():
            pieces.clear()
        for piece in self._timetable:
            self._of[id(piece.bucket)].append(piece)
        self._order = list(self._timetable)


def _work(pending: Pending | None) -> object:
    """The operation itself, inside what names who has gone."""
    return getattr(pending, "pending", pending)


def _wait(pending: Pending | None) -> None:
    if pending is not None:
        pending.wait()


def timetable(
    ready: Sequence[float], seconds: Sequence[float], urgent: Sequence[int], window: float
) -> list[tuple[int, float]]:
    """(slice, slices that may be under way with it) in the order in which they depart: from a simulation of one
    backward on one link.

    ready: when each slice's gradients are there, seconds from the start of backward. seconds: that the link takes for
    it. urgent: its turn in the next forward; the least is the most urgent. window: slices that may be under way in any
    case. The link serves one slice after the other. A slice can depart when some gradient comes, since nothing else
    runs beside backward; so as many depart then as keep the link busy until the next one comes, the most urgent first.
    None is stopped on its way; those that wait are overtaken.
    """
    moments = sorted(set(ready))
    coming = sorted(range(len(ready)), key=lambda i: (ready[i], urgent[i], i))
    waiting: list[tuple[int, int]] = []
    order: list[tuple[int, float]] = []
    ends: list[float] = []  # of those that departed, ascending
    at = 0
    for now, then in zip(moments, [*moments[1:], inf], strict=True):
        while at < len(coming) and ready[coming[at]] <= now:
            heapq.heappush(waiting, (urgent[coming[at]], coming[at]))
            at += 1
        while waiting:
            under_way = len(ends) - bisect_right(ends, now)
            if under_way >= window and ends[-1] >= then:
                break
            _, chosen = heapq.heappop(waiting)
            order.append((chosen, max(window, under_way + 1)))
            ends.append(max(now, ends[-1] if ends else now) + seconds[chosen])
    return order
