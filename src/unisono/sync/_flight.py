"""One bucket's exchange under way, and its operations, as `sync/_drive.py` leads it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from unisono.codecs import Deal, Exchange, Gather, Request, Sum
from unisono.comm.group import Group, Pending


@dataclass(slots=True)
class BucketFlight:
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
