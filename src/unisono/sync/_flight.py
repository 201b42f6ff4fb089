"""One bucket's exchange under way, as `sync/_drive.py` leads it."""

import time
from dataclasses import dataclass

from torch import Tensor

from unisono.codecs import Exchange
from unisono.comm.group import Pending


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
