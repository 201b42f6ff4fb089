"""What clients and server of a secure round send each other: numbers, bytes and one vector."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class PublicKeys:
    """A client's two X25519 keys, 32 bytes each: for sealing shares, and for masks. client: its number, from 1."""

    client: int
    sealing: bytes
    masking: bytes


@dataclass(frozen=True, slots=True)
class Sealed:
    """Two shares for one receiver, which the server passes on and cannot read."""

    sender: int
    receiver: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Masked:
    """A client's vector under its masks, uint64 [d]."""

    client: int
    vector: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Revealed:
    """The shares that one client holds. self_masks: of the seeds of those whose vectors came. keys: of the mask keys of
    those who dropped out. Of nobody both, or the server could take all masks off one vector."""

    client: int
    self_masks: Mapping[int, int]
    keys: Mapping[int, int]
