"""Gradients that are there in a backward pass and in no buffer yet: of a small model these are all."""

from typing import Annotated

from unisono.planner.memory import RowShare
from unisono.planner.source import Source

_WARM = Source(
    "specification", "train.step.bucketing.WARM_BYTES: gradients that move into their buffer together"
)
WARM: Annotated[float, _WARM] = float(256 << 10)


def unbuffered(
    waits: bool, share: RowShare, ends: float, whole: float, block: float, matrix: float
) -> tuple[float, float, float]:
    """Bytes of gradients outside of buffers as a backward pass comes to its last block, to its first, and to its end.

    waits: whether sums wait until backward is over; else gradients move into a buffer as they come, together up to
    `WARM` bytes, or as one that is larger. ends, whole, block, matrix: bytes of gradients of these.
    """
    if waits:  # of the block under way, the gradients of what comes behind its activation are there
        return ends + matrix, whole - 0.5 * block, 0.0
    head = ends * share.head / max(1.0, share.head + share.stem)
    came = head + matrix, whole - ends + head - block + matrix
    return max(matrix, min(came[0], WARM)), max(matrix, min(came[1], WARM)), min(whole, WARM)
