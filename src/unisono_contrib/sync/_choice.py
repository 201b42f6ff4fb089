"""Which codec of several a run plays: measured when it begins, weighed again when backward's time is known.

All ranks of a run decide alike, also those that hold the same weights in other groups of `dp`: else their copies would
drift apart. So what is weighed are the largest numbers of any rank.

What an exchange takes is measured on their own links. A stretch of the gradient, parameters in the order in which they
leave, is exchanged with each codec as a step does. It grows until the first codec takes a while, so that slow links are
not kept busy and quick ones are measured well. From two sizes follow what a bucket takes before its first byte and what
an element takes.
"""

import time
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Size, Tensor, nn

from unisono.codecs import Coder
from unisono.comm.bucket import Bucket
from unisono.comm.device import has_numbers
from unisono.comm.group import Group
from unisono.observe.span import Recorder
from unisono.spec.words import seconds as written
from unisono.sync import Sync
from unisono.sync._around import SyncAround
from unisono.sync._drive import Drive

if TYPE_CHECKING:
    from unisono_contrib.codecs.auto import LadderCoder

WARM, KNOWN = 1, 3
"""Steps after which backward is looked at, and after which its time counts."""
HIDES = 0.5
"""Of backward, what buckets that leave one after the other hide behind: the last one leaves when it is over."""
BUCKET_BYTES = 25 << 20
SMALL, GROWTH = 1 << 14, 8
"""Elements of the first stretch, and how many times longer each next one is."""
ENOUGH = 0.08
"""Seconds that one exchange takes where growing ends."""
ROUNDS = 3
"""Exchanges of each, of which the quickest counts; the first finds nothing in a cache."""


@dataclass(frozen=True, slots=True)
class CodecSeconds:
    """Seconds of the exchange of a whole gradient, and the seconds that a thread computed, which nothing hides."""

    whole: float
    computed: float


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of one rank. shapes: of its parameters, in the order of the model."""

    shapes: Sequence[Size]
    dtype: torch.dtype
    device: torch.device

    @property
    def elements(self) -> int:
        return sum(shape.numel() for shape in self.shapes)

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize

    @property
    def buckets(self) -> int:
        """About how many buckets it travels in, if no codec says otherwise: the first is small."""
        return 1 + -(-self.nbytes // BUCKET_BYTES)

    def last(self, numel: int) -> list[nn.Parameter]:
        """Parameters like the last ones, of about so many elements together."""
        params, left = list[nn.Parameter](), numel
        for shape in reversed(self.shapes):
            if left <= 0:
                break
            if shape.numel() > left and len(shape):
                shape = Size((max(1, left * shape[0] // shape.numel()), *shape[1:]))
            params.append(nn.Parameter(torch.zeros(shape, dtype=self.dtype, device=self.device)))
            left -= shape.numel()
        return params


def probe(coders: Sequence[Coder], gradient: Gradient, dp: Group, world: Group) -> list[CodecSeconds]:
    """Seconds of a step of each, the most of any rank of `world`, the same on all. Every rank calls it, or it hangs."""
    group, world = copy(dp), copy(world)
    group.recorder = world.recorder = Recorder(dp.recorder.rank)  # what is tried is in no ledger
    longest = int(_most(torch.tensor([float(gradient.elements)]), world)[0])
    sizes, times = [], list[Tensor]()
    size = SMALL
    while True:
        sizes.append(min(size, longest))
        times.append(_most(_measured(coders[:1], gradient, sizes[-1], group), world))
        if times[-1][0, 0] >= ENOUGH or sizes[-1] >= longest:
            break
        size *= GROWTH
    small = _most(_measured(coders[1:], gradient, sizes[0], group), world)
    large = small if len(sizes) == 1 else _most(_measured(coders[1:], gradient, sizes[-1], group), world)
    both = torch.cat([times[0], small]), torch.cat([times[-1], large])
    # The line through both, as a step has it: so many buckets, so many elements.
    slope = (both[1] - both[0]).clamp_min(0.0) / max(1, sizes[-1] - sizes[0])
    start = (both[0] - slope * sizes[0]).clamp_min(0.0)
    if len(sizes) == 1:
        slope, start = both[1] / sizes[-1], torch.zeros_like(start)
    # What goes in small exchanges has many in the longer stretch already, one encoded while another travels.
    starts = torch.tensor([[1.0 if coder.cap else float(gradient.buckets)] for coder in coders])
    total = starts * start + slope * gradient.elements
    return [CodecSeconds(whole, min(whole, computed)) for whole, computed in _most(total, world).tolist()]


def _measured(coders: Sequence[Coder], gradient: Gradient, numel: int, group: Group) -> Tensor:
    """[coders, 2] float64: seconds of an exchange of a bucket of about so many elements, and what was computed."""
    params = gradient.last(numel)
    seconds = torch.zeros(len(coders), 2, dtype=torch.float64)
    if group.size == 1 or not params:
        return seconds
    mark = torch.zeros(1)
    for place, coder in enumerate(coders):
        drive, times = Drive(coder, group, {str(i): p for i, p in enumerate(params)}), []
        buckets = [Bucket(run, group.size) for run in _runs(params, coder.cap)]
        for _ in range(ROUNDS):
            for bucket in buckets:
                # Nobody's random numbers are drawn.
                bucket.flat.copy_(torch.linspace(-1.0, 1.0, len(bucket.flat)))
            group.all_reduce(mark)  # all begin together
            begun, busy = time.perf_counter(), time.thread_time()
            for bucket in buckets:
                drive.begin(bucket)
            drive.finish()
            buckets[-1].flat[:1].tolist()  # what a device was told to do is done
            times.append((time.perf_counter() - begun, time.thread_time() - busy))
        seconds[place] = torch.tensor(min(times), dtype=torch.float64)
    return seconds


def _runs(params: Sequence[nn.Parameter], cap: int) -> list[list[nn.Parameter]]:
    """Parameters of one bucket each: all, or so many that they have up to `cap` bytes."""
    runs, room = list[list[nn.Parameter]](), 0
    for p in params:
        if not runs or (cap and p.nbytes > room):
            runs.append([])
            room = cap
        runs[-1].append(p)
        room -= p.nbytes
    return runs


def _most(x: Tensor, world: Group) -> Tensor:
    """The largest of any rank, element by element."""
    return world.all_gather(x.double()[None]).amax(0)


class ChoosingSync(SyncAround):
    """A policy, and beside it the choice of its codec. later: ranks are between two steps at the same time, so that
    they can decide again there. Every rank of `world` makes one and calls `after_update`, or it hangs."""

    def __init__(
        self, inner: Sync, coder: "LadderCoder", gradient: Gradient, world: Group, *, later: bool = True
    ) -> None:
        super().__init__(inner)
        self.coder, self.gradient, self.world, self.later = coder, gradient, world, later
        self._steps, self._since = 0, (0, torch.zeros(2))  # and when computing was looked at last, its time
        # Sums in memory that all see cost less than encoding, and begin when backward is over.
        self._near = inner.dp.near(gradient.device)
        self._why, self._announced = "", False
        self._seconds: Sequence[CodecSeconds] = ()
        self._measure()
        self._decide(0.0, 0.0)
        # Of buckets that are laid out now, and stay as they are.
        self.cap = inner.cap if inner.sliced or inner.settled else coder.now.cap

    def _measure(self) -> None:
        here = torch.tensor([float(not self._near)])
        if self.world.all_gather(here[None]).amax():
            tried = [rung.bind() for rung in self.coder.member.rungs.values()]
            self._seconds = probe(tried, self.gradient, self.dp, self.world)

    def _decide(self, backward: float, computing: float) -> None:
        """Seconds of a step: of backward, and of all computing; 0 where they are not known."""
        if not self._seconds:
            place, why = 0, f"replicas of {self.dp.axis} see each other's memory"
        else:
            shows = self._shown(HIDES * backward)
            place = self.coder.member.taken([computing + shown for shown in shows])
            why = self._reason(shows, backward)
        said = f"{self.coder.rungs[place][0]}: {why}"
        if said != self._why:
            self._why, self._announced = said, False
        if not self._steps or self.coder.now is not self.coder.rungs[place][1]:
            self.coder.take(place)

    def _shown(self, hidden: float) -> list[float]:
        """Seconds that show with each: encoding, and what travels beyond what is hidden; the last exchange of a step
        has nothing to hide behind in any case."""
        shows, gradient = list[float](), self.gradient
        for took, (_, coder) in zip(self._seconds, self.coder.rungs, strict=True):
            parts = max(1, gradient.nbytes // coder.cap) if coder.cap else gradient.buckets
            travels = took.whole - took.computed
            shows.append(took.computed + max(travels - hidden, travels / parts if hidden else 0.0))
        return shows

    def _reason(self, shows: Sequence[float], backward: float) -> str:
        names = [name for name, _ in self.coder.rungs]
        each = ", ".join(f"{name} {written(shown)}" for name, shown in zip(names, shows, strict=True))
        n = self.dp.size
        rate = 2 * (n - 1) / n * self.gradient.nbytes / self._seconds[0].whole
        behind = f"a backward of {written(backward)}" if backward else "nothing"
        return f"beside {behind} a step shows {each}; of plain sums a rank sends {8e-6 * rate:,.0f} Mbit/s"

    def after_update(self, step: int) -> None:
        self.inner.after_update(step)
        self._steps += 1
        if not self.later or not self._seconds:
            return
        if self._steps == WARM:
            self._since = self._steps, self._computing()
        again = self.coder.member.again
        due = bool(again) and self._steps % again == 0 and self._steps > WARM
        if self._steps != KNOWN and not due:
            return
        if due:
            self._measure()
        steps, before = self._since
        now = self._computing()
        mean = (now - before) / max(1, self._steps - steps)
        self._since = self._steps, now
        self._decide(*self.world.all_gather(mean[None]).amin(0).tolist())

    def _computing(self) -> Tensor:
        """Seconds so far: of backward, and of it and forward."""
        totals = self.dp.recorder.totals()
        forward, backward = totals.get("forward", 0.0), totals.get("backward", 0.0)
        return torch.tensor([backward, forward + backward], dtype=torch.float64)

    def says(self) -> str:
        return self._why

    def metrics(self) -> Mapping[str, Any]:
        chosen = {} if self._announced else {"codec": self.coder.called, "codec_why": self._why}
        self._announced = True
        return {**self.inner.metrics(), **chosen}


def choosing(sync: Sync, coder: Coder, slots: Sequence[Any], world: Group, *, later: bool = True) -> Sync:
    """The policy itself, or with the choice of its codec where the plan leaves it to what is measured. Every rank of
    `world` calls it, or it hangs."""
    learning = [slot.master for slot in slots if slot.live.requires_grad and not slot.sparse]
    device = learning[0].device if learning else torch.device("cpu")
    if not coder.rungs or sync.dp.size == 1 or not has_numbers(device):
        return sync
    shapes, dtype = (
        [Size(p.shape) for p in learning],
        (learning[0].grad_dtype or learning[0].dtype) if learning else torch.float32,
    )
    gradient = Gradient(shapes, dtype, device)
    return ChoosingSync(sync, cast("LadderCoder", coder), gradient, world, later=later)
