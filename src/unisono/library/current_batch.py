"""The batch at hand: what it weighs on this rank, and which of the batches dealt lately a forward computes on.

A loop may fetch the next batch before it uses this one, walk two loaders at once, or validate in between. So a weight
belongs to a batch and not to the moment: the forward's inputs say which batch it is (they lie in its memory, or have as
many samples), and a backward takes the weight of the forwards before it.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from unisono.library.batches import leaves_of, samples_in
from unisono.library.notices import Notices
from unisono.spec.errors import UsageError

LATELY = 32  # batches that a forward may still use


def part(count: int, index: int, size: int) -> tuple[int, int]:
    """The samples [low, high) of a batch of `count` that fall to rank `index` of `size`."""
    return index * count // size, (index + 1) * count // size


@dataclass(eq=False, slots=True)
class Walk:
    """One walk through a loader. fetched, used: batches that the loop got, and that a forward computed on (the latest
    and all before it). chain: a digest of the order up to the batch used last."""

    loader: int
    number: int
    fetched: int = 0
    used: int = 0
    chain: int = 0
    fetched_chain: int = 0
    over: bool = False


@dataclass(eq=False, slots=True)
class BatchShard:
    """This rank's samples [low, high) of a global batch of `count`. ratio: what the mean over them is multiplied by,
    so that the mean over ranks is the mean over the global batch; 0 if the one sample here is another rank's."""

    low: int
    high: int
    count: int
    ratio: float
    walk: Walk
    place: int = 0
    chain: int = 0
    uneven: bool = False  # whether ranks weigh differently
    tensors: tuple[weakref.ref[Tensor], ...] = ()
    used: bool = False
    weighed: bool = False
    guessed: bool = False  # whether ranks may have taken different batches for it
    aside: bool = False  # whether a thread of the loop's fetched it
    drawn: int = field(default=0)  # how often numbers were drawn for its samples
    # [low, high) of each rank, where ranks brought batches of their own.
    dealt: tuple[tuple[int, int], ...] = ()

    @property
    def borrowed(self) -> bool:
        return self.count > 0 and self.low == self.high

    @property
    def samples(self) -> int:
        return max(1, self.high - self.low)

    def parts(self, size: int) -> tuple[tuple[int, int], ...]:
        """[low, high) of each of `size` ranks."""
        return self.dealt or tuple(part(self.count, index, size) for index in range(size))

    def holds(self, x: Tensor) -> bool:
        """Whether x lies in the memory of one of this batch's tensors."""
        at = _address(x)
        for ref in self.tensors:
            tensor = ref()
            if tensor is not None and tensor.data_ptr() <= at < tensor.data_ptr() + max(tensor.nbytes, 1):
                return True
        return False


def _address(x: Tensor) -> int:
    """Where a tensor's numbers lie; of one that torch.func has wrapped, those of the tensor inside."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):  # type: ignore[attr-defined]
        x = torch._C._functorch.get_unwrapped(x)  # type: ignore[attr-defined]
    return x.data_ptr()


class CurrentBatch:
    """Which batch this rank computes on. index, size: of this rank among those that share a batch."""

    def __init__(
        self,
        index: int,
        size: int,
        notify: Notices,
        begun: Callable[[Sequence[Tensor], int], None] = lambda tensors, samples: None,
    ) -> None:
        """begun: shown the tensors of each batch as the loop gets it, with their samples here."""
        self.index, self.size, self._notify, self._begun = index, size, notify, begun
        self._none = self.current = BatchShard(0, 0, 0, 1.0, Walk(-1, 0))  # all ranks compute on the same
        self._recent: deque[BatchShard] = deque(maxlen=LATELY)
        self._trained: list[BatchShard] = []  # of the forwards that the next backward goes through
        self._thread = threading.get_ident()
        self._stale = False  # a backward has gone through them
        self._spent: list[BatchShard] = []  # of updates without one

    @property
    def ratio(self) -> float:
        return self.current.ratio

    @property
    def latest(self) -> BatchShard:
        """The batch of the last forward that a backward may go through."""
        return self._trained[-1] if self._trained else self.current

    def fetched(self, batch: Any, low: int, high: int, count: int, walk: Walk, chain: int) -> None:
        """The loop is about to be given this batch."""
        arrays = [x for x in leaves_of(batch) if isinstance(x, Tensor)]
        if high > low:
            self._begun(arrays, high - low)
        tensors = tuple(weakref.ref(x) for x in arrays)
        ratio = (high - low) * self.size / count
        uneven = count % self.size > 0
        aside = threading.get_ident() != self._thread
        place = walk.fetched
        self.current = BatchShard(low, high, count, ratio, walk, place, chain, uneven, tensors, aside=aside)
        walk.fetched += 1
        self._recent.append(self.current)

    def joined(self, batch: Any, counts: Sequence[int], walk: Walk, chain: int) -> None:
        """Do as `fetched` for a batch that this rank alone has. counts: samples of each rank's batch."""
        ends = list(accumulate(counts))
        dealt = tuple((end - count, end) for end, count in zip(ends, counts, strict=True))
        self.fetched(batch, *dealt[self.index], ends[-1], walk, chain)
        self.current.dealt, self.current.uneven = dealt, len(set(counts)) > 1

    def of(self, batch: Any) -> BatchShard | None:
        """What is known of a batch that was dealt lately."""
        tensors = [x for x in leaves_of(batch) if isinstance(x, Tensor) and x.numel()]
        return next((b for b in reversed(self._recent) if any(b.holds(x) for x in tensors)), None)

    def says(self) -> tuple[str, int]:
        """Name the backward that has just run, the same on every rank, and number it; "" where ranks may have guessed
        different batches."""
        batch, walk = self.latest, self.latest.walk
        if not batch.count or batch.guessed:
            return "" if batch.guessed else "backward", 0
        loader = f" of loader {walk.loader + 1}" if walk.loader else ""
        far = (walk.number << 32) + batch.place
        return f"backward on batch {batch.place + 1} of pass {walk.number + 1}{loader}", far

    def ended(self, walk: Walk, exhausted: bool) -> bool:
        """End a pass, also one that the loop has left early. Return whether no batch is at hand now."""
        walk.over = True
        waiting = [b for b in self._waiting() if b.walk is walk]
        left = bool(waiting) and bool(walk.used or not exhausted)
        self.current = waiting[0] if left else self._none
        return not left

    def expected(self) -> BatchShard:
        """Return the batch that the next forward will most likely use: the first that waits."""
        waiting = self._waiting() if not self.current.used else []
        return next((b for b in waiting if b.walk is self.current.walk), self.current)

    def weigh(self, count: float, total: float) -> None:
        batch = self.current = self.expected()
        batch.ratio, batch.weighed = count * self.size / total, True

    def forward(self, inputs: Any, trains: bool) -> BatchShard:
        """A forward begins; trains: whether a backward may go through it."""
        batch = self.current = self._of(inputs)
        if not batch.used:
            batch.used, walk = True, batch.walk
            if batch.place >= walk.used:
                walk.used, walk.chain = batch.place + 1, batch.chain
        if trains:
            if self._stale:
                self._trained, self._stale = [], False
            if not any(batch is other for other in self._trained):
                self._trained.append(batch)
        return batch

    def backward(self) -> None:
        """A backward begins: the batch at hand is the one that it goes back to. Raises UsageError J11 for several
        batches of unlike weights, whose gradients are one sum here."""
        if not self._trained:
            return
        first, *others = self._trained
        self._stale, self.current = True, self._trained[-1]
        for other in others:
            unlike = first.uneven or other.uneven or first.weighed or other.weighed
            if unlike and (other.ratio != first.ratio or other.count != first.count):
                raise UsageError(
                    f"one backward goes back to a batch of {first.count} samples and to one of {other.count}, "
                    "which the ranks weigh differently",
                    where="backward",
                    fix="loss.backward() for each batch by itself, or batches that the ranks divide",
                    code="J11",
                )

    def update(self) -> None:
        """Do as `backward` where gradients were made without one: they belong to the batches since the last update."""
        self._trained = [
            b for b in self._trained if not any(b is old for old in self._spent)
        ] or self._trained[-1:]
        self.backward()
        self._spent = list(self._trained)

    def _waiting(self) -> list[BatchShard]:
        return [b for b in self._recent if not b.used and b.place >= b.walk.used]

    def _of(self, inputs: Any) -> BatchShard:
        tensors = [x for x in leaves_of(inputs) if isinstance(x, Tensor) and x.numel()]
        for batch in reversed(self._recent):
            if any(batch.holds(x) for x in tensors):
                batch.guessed = False
                return batch
        batch = self._likely(tensors)
        batch.guessed = any(b.uneven or b.aside for b in self._recent)
        return batch

    def _likely(self, tensors: list[Tensor]) -> BatchShard:
        rows = samples_in(tensors)
        likely = [b for b in self._waiting() if b.samples == rows]
        if not likely or (self.current.used and self.current.samples == rows):
            return self.current  # numbers that the loop made, or this batch once more
        same = [b for b in likely if b.walk is self.current.walk] or likely
        if any((b.uneven, b.ratio) != (same[0].uneven, same[0].ratio) for b in same):
            self._notify(
                "J11", "several batches of unlike weights wait, and the forward's inputs are none of theirs"
            )
        return same[0]
