"""What sparse codecs have in common: how many elements are sent, and how these lie in bytes. No torch.

A place takes two bytes. Where the elements are sorted, it counts from the beginning of its span of 65,536 elements,
and a tally says how many of them each span has. Where each chunk sends a number of elements that is known, no tally is
needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import ClassVar

from pydantic import Field

from unisono.codecs import Codec

SPAN = 1 << 16
CHUNK = 4096
_ALIGNED = 8  # bytes: the widest number that is read where it lies


def kept_of(numel: int, ratio: float) -> int:
    """How many of so many elements a share is: at least one, if there are any."""
    return min(numel, max(1, ceil(ratio * numel)))


class Sparse(Codec):
    """A codec that sends a share of each parameter's elements."""

    biased: ClassVar[bool] = True
    tells: ClassVar[bool] = True
    sparse: ClassVar[bool] = True

    ratio: float = Field(default=0.01, gt=0, le=1, description="share of the elements that are sent")
    dense: int = Field(
        default=256, ge=0, description="parameters of fewer elements, or of one dim, go whole; 0: none does"
    )

    def spared(self, shape: Sequence[int]) -> bool:
        """Whether a parameter goes whole: norms and biases are few and matter much."""
        return self.dense > 0 and (len(shape) < 2 or prod(shape) < self.dense)

    def share(self, shape: Sequence[int]) -> float:
        """Of a parameter's elements, what is sent."""
        return 1.0 if self.spared(shape) else self.ratio

    def kept(self, shape: Sequence[int]) -> int:
        """How many elements of a parameter are sent."""
        return kept_of(prod(shape), self.share(shape))


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
