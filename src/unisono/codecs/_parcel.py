"""How values and places of a bucket's chosen elements lie in the bytes that a replica gives. No torch.

A place takes two bytes. Where the elements are sorted, it counts from the beginning of its span of 65,536 elements,
and a tally says how many of them each span has. Where each chunk sends a number of elements that is known, no tally is
needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

SPAN = 1 << 16
CHUNK = 4096
_ALIGNED = 8  # bytes: the widest number that is read where it lies


def kept_of(numel: int, ratio: float) -> int:
    """How many of so many elements a share is: at least one, if there are any."""
    return min(numel, max(1, ceil(ratio * numel)))


def chunks_of(numels: Sequence[int]) -> list[tuple[int, int]]:
    """(begin, length) in the bucket of each parameter's chunks; none reaches into the next parameter."""
    found, begin = [], 0
    for numel in numels:
        found += [(begin + at, min(CHUNK, numel - at)) for at in range(0, numel, CHUNK)]
        begin += numel
    return found


@dataclass(frozen=True, slots=True)
class Parcel:
    """Sizes of what one replica gives of one bucket: values, then tallies, then places.

    numel: elements of the bucket, without what fills it up. kept: of them those that are sent. width: bytes of a value.
    tallied: whether places are sorted over the bucket.
    """

    numel: int
    kept: int
    width: int
    tallied: bool = True

    @property
    def spans(self) -> int:
        """Numbers that say how many elements each span has."""
        return -(-self.numel // SPAN) if self.tallied else 0

    @property
    def tallies(self) -> int:
        """Byte at which the tallies begin."""
        return _up(self.kept * self.width)

    @property
    def places(self) -> int:
        """Byte at which the places begin."""
        return _up(self.tallies + 4 * self.spans)

    @property
    def nbytes(self) -> int:
        """Of all."""
        return _up(self.places + 2 * self.kept)


def _up(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED
