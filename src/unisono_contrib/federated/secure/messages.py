"""What clients and server of a secure round send each other: numbers, bytes and one vector.

Clients are numbered from 1 here, since Shamir's share of 0 is the secret.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SHARE_BYTES = 66  # 521 bits


@dataclass(frozen=True, slots=True)
class PublicKeys:
    """A client's two X25519 keys, 32 bytes each: for sealing shares, and for masks. client: its number, from 1."""

    client: int
    sealing: bytes
    masking: bytes

    @property
    def nbytes(self) -> int:
        return len(self.sealing) + len(self.masking)


@dataclass(frozen=True, slots=True)
class Sealed:
    """Two shares for one receiver, which the server passes on and cannot read."""

    sender: int
    receiver: int
    body: bytes

    @property
    def nbytes(self) -> int:
        return len(self.body)


@dataclass(frozen=True, slots=True)
class Masked:
    """A client's vector under its masks, uint64 [d]."""

    client: int
    vector: NDArray[np.uint64]

    @property
    def nbytes(self) -> int:
        return self.vector.nbytes


@dataclass(frozen=True, slots=True)
class Revealed:
    """The shares that one client holds. self_masks: of the seeds of those whose vectors came. keys: of the mask keys of
    those who dropped out. Of nobody both, or the server could take all masks off one vector."""

    client: int
    self_masks: Mapping[int, int]
    keys: Mapping[int, int]

    @property
    def nbytes(self) -> int:
        return SHARE_BYTES * (len(self.self_masks) + len(self.keys))


@dataclass(frozen=True, slots=True)
class Advertise:
    """Make keys for this round. threshold: how many clients must reveal."""

    threshold: int


@dataclass(frozen=True, slots=True)
class Share:
    """Share your secrets among these clients. weight: what this client counts for, its share of the round's samples."""

    directory: Mapping[int, PublicKeys]
    weight: float


@dataclass(frozen=True, slots=True)
class Mask:
    """Send your vector under masks. letters: what the others have sent this client."""

    letters: Sequence[Sealed]


@dataclass(frozen=True, slots=True)
class Reveal:
    """Send what takes the masks off the survivors' sum."""

    survivors: frozenset[int]


Request = Advertise | Share | Mask | Reveal
Reply = PublicKeys | Sequence[Sealed] | Masked | Revealed
REQUESTS = (Advertise, Share, Mask, Reveal)
"""In the order of a round."""
