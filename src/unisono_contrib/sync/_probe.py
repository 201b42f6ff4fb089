"""What replicas would take to exchange their gradients with each of several codecs: measured on their own links.

A stretch of the gradient, parameters in the order in which they leave, is exchanged with each codec as a step does. It
grows until the first codec takes a while, so that slow links are not kept busy and quick ones are measured well. From
two sizes follow what a bucket takes before its first byte and what an element takes.
"""

import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Size, Tensor, nn

from unisono.codecs import Coder
from unisono.comm.bucket import Bucket
from unisono.comm.group import Group
from unisono.observe.span import Recorder
from unisono.sync._drive import Drive

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
                bucket.flat.copy_(
                    torch.linspace(-1.0, 1.0, len(bucket.flat))
                )  # nobody's random numbers are drawn
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
