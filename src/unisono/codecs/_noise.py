"""Uniform noise for rounding up or down: read from a table, at a place that a hash of the step chooses.

A generator takes twelve times as long as the rounding itself. One table of uniform numbers serves all: where in it an
element reads differs from step to step, and from replica to replica.
"""

from hashlib import blake2b

import torch
from torch import Tensor

SHIFTS = 1 << 16
"""Places at which a draw may begin."""


def lot(*what: int | str) -> int:
    """A number of 63 bits, as good as drawn for each `what`: the seed, the step, names, whose it is.

    A checksum would not do: those of two replicas differ by the same bits in every step, so both would go through the
    same numbers, and their errors would not cancel.
    """
    return int.from_bytes(blake2b(repr(what).encode(), digest_size=8).digest(), "little") >> 1


class NoiseTable:
    """A table for draws of up to `most` numbers, the same in every process that has this seed."""

    def __init__(self, seed: int, most: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._table = torch.rand(most + SHIFTS, generator=generator).to(device)

    def drawn(self, numel: int, *what: int | str) -> Tensor:
        """[numel] in [0, 1), for whatever `what` says: the step, names, whose it is."""
        start = lot(*what) % SHIFTS
        return self._table[start : start + numel]
