"""How large the buckets of `sync/every_step.py` are: as its option says, or as links are measured."""

from collections.abc import Sequence
from math import sqrt
from typing import Any, TypeVar

from unisono.comm.device import has_numbers
from unisono.sync import Sync
from unisono.sync._link import measured_link

LEAST, MOST = 1 << 20, 25 << 20

S = TypeVar("S", bound=Sync)


def tuned(nbytes: int, before: float, rate: float) -> int:
    """Bytes of a bucket, a multiple of 1 KiB between 1 and 25 MiB. nbytes: of all gradients. before: seconds that a sum
    takes before its bytes count. rate: bytes that are summed in a second.

    Of n buckets each costs `before`, and the last one, which nothing hides, `nbytes / n / rate`: together the least for
    buckets of `sqrt(nbytes * rate * before)`.
    """
    return int(min(MOST, max(LEAST, sqrt(nbytes * rate * before)))) >> 10 << 10


def sized(sync: S, bucket: float | str, slots: Sequence[Any]) -> S:
    """The policy with buckets of so many MiB; 0: as it is. Every member of its group calls it, or it hangs."""
    learning = [slot.master for slot in slots if slot.live.requires_grad]
    if bucket == "auto":
        if (
            not learning
            or sync.dp.size == 1
            or not has_numbers(learning[0].device)
            or sync.dp.near(learning[0].device)
        ):
            return sync
        nbytes = sum(p.numel() * (p.grad_dtype or p.dtype).itemsize for p in learning)
        sync.cap = tuned(nbytes, *measured_link(sync.dp, learning[0].device))
        sync.settled = f"every_step:bucket={sync.cap / 2**20:g}"
    elif bucket:
        sync.cap, sync.sliced = max(1, int(float(bucket) * 2**20)), True
    return sync
