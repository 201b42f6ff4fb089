"""What a sample is before anybody computes on it: bytes where it is stored, and bytes that a device takes."""

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Sample:
    """Bytes of one sample. stored: as it lies in storage. copied: of inputs, targets and the sample's number as the
    host hands them to a device."""

    stored: float = 0.0
    copied: float = 0.0


UNSAID = Sample()


def text(context: int, vocab: int | None) -> Sample:
    """`context` tokens: stored in the narrowest of 1, 2 or 4 bytes that knows the vocabulary (None: 4), as our own
    token files are; handed over as 64-bit integers, each token as an input and as a target."""
    item = 4 if vocab is None or vocab > 1 << 16 else 2 if vocab > 1 << 8 else 1
    return Sample(float(item * context), 16.0 * context + 8)


def picture(image: tuple[int, ...]) -> Sample:
    """A picture of shape (colours, rows, columns): a byte for each value where it is stored, which a compressed file
    undercuts; handed over in fp32."""
    return Sample(float(prod(image)), 4.0 * prod(image) + 16)


def features(dense: int, indices: int) -> Sample:
    """A row of a recommender's table: numbers and indices of 4 bytes and a label; indices are handed over as 64-bit
    integers."""
    return Sample(4.0 * (dense + indices + 1), 4.0 * dense + 8.0 * indices + 12)
