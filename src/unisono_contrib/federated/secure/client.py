"""A client of one secure round."""

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from unisono.spec.errors import UsageError
from unisono_contrib.federated.secure import masks, shamir
from unisono_contrib.federated.secure.messages import SHARE_BYTES, Masked, PublicKeys, Revealed, Sealed

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey


@dataclass(slots=True)
class SecureClient:
    """One client in one round, which calls advertise, share, mask and reveal in this order, once each. Its keys are of
    this round alone.

    client: its number, from 1. threshold: how many clients must reveal; more than half of the round's. session: bytes
    that name run and round, the same for all. Raises UsageError E01 without `cryptography`."""

    client: int
    threshold: int
    session: bytes = b""
    _sealing: "X25519PrivateKey" = field(init=False, repr=False)
    _masking: "X25519PrivateKey" = field(init=False, repr=False)
    _seed: bytes = field(init=False, repr=False)
    _others: dict[int, PublicKeys] = field(default_factory=dict, repr=False)
    _shares: dict[int, tuple[int, int]] = field(default_factory=dict, repr=False)
    _revealed: bool = False

    def __post_init__(self) -> None:
        masks.require_library()
        self._sealing, self._masking = masks.new_key(), masks.new_key()
        self._seed = secrets.token_bytes(masks.KEY_BYTES)

    def advertise(self) -> PublicKeys:
        """The public keys, for everybody."""
        sealing, masking = (key.public_key().public_bytes_raw() for key in (self._sealing, self._masking))
        return PublicKeys(self.client, sealing, masking)

    def share(self, directory: Mapping[int, PublicKeys]) -> list[Sealed]:
        """A message for every other client of the directory: its share of this one's seed and mask key. Raises
        UsageError A02 where these clients are too few, or so many that a threshold of them is no majority."""
        require_majority(self.threshold, len(directory))
        if directory.get(self.client) != self.advertise():
            what = f"client {self.client} is not in the directory of the round with the keys that it sent"
            raise UsageError(what, where="federated.secure", fix="leave the round", code="A03")
        self._others = {number: keys for number, keys in directory.items() if number != self.client}
        holders = sorted(directory)
        seed = shamir.split(int.from_bytes(self._seed, "big"), holders, self.threshold)
        key = shamir.split(int.from_bytes(self._masking.private_bytes_raw(), "big"), holders, self.threshold)
        self._shares = {self.client: (seed[self.client], key[self.client])}
        return [self._sealed(number, seed[number], key[number]) for number in sorted(self._others)]

    def mask(self, sealed: Sequence[Sealed], vector: NDArray[np.uint64]) -> Masked:
        """vector [d] under all masks. sealed: what the others have sent this client. Its senders take part from here
        on, and who has sent nothing does not. Raises UsageError A02, A03."""
        for message in sealed:
            self._shares[message.sender] = self._opened(message)
        require_enough(len(self._shares), self.threshold, "have shared their keys")
        out = vector + masks.mask(self._seed, len(vector))
        for number in sorted(self._shares.keys() - {self.client}):
            out = out + pair_mask(self._masking, self.client, self._others[number], self.session, len(vector))
        return Masked(self.client, out)

    def reveal(self, survivors: Collection[int]) -> Revealed:
        """What takes the masks off the sum of the survivors' vectors. survivors: clients whose `Masked` came. Raises
        UsageError A02 where they are fewer than the threshold, A03 where the client is asked twice: two answers could
        unmask one client."""
        alive = {*survivors} & self._shares.keys()
        require_enough(len(alive), self.threshold, "have sent their vectors")
        if self._revealed:
            what = f"client {self.client} is asked a second time what it holds of the others' masks"
            fix = "a new round, with new keys; a server that asks twice can see single updates"
            raise UsageError(what, where="federated.secure", fix=fix, code="A03")
        self._revealed = True
        return Revealed(
            self.client,
            {number: self._shares[number][0] for number in sorted(alive)},
            {number: self._shares[number][1] for number in sorted(self._shares.keys() - alive)},
        )

    def _sealed(self, receiver: int, seed: int, key: int) -> Sealed:
        text = b"".join(share.to_bytes(SHARE_BYTES, "big") for share in (seed, key))
        about = self._about(self.client, receiver)
        secret = masks.agreed(self._sealing, self._others[receiver].sealing, about)
        return Sealed(self.client, receiver, masks.seal(secret, text, about))

    def _opened(self, message: Sealed) -> tuple[int, int]:
        if message.receiver != self.client or message.sender not in self._others:
            what = f"client {self.client} got a share from {message.sender} to {message.receiver}"
            raise UsageError(what, where="federated.secure", fix="leave the round", code="A03")
        about = self._about(message.sender, self.client)
        secret = masks.agreed(self._sealing, self._others[message.sender].sealing, about)
        text = masks.opened(secret, message.body, about)
        seed, key = text[:SHARE_BYTES], text[SHARE_BYTES:]
        return int.from_bytes(seed, "big"), int.from_bytes(key, "big")

    def _about(self, sender: int, receiver: int) -> bytes:
        return b"share %d to %d of " % (sender, receiver) + self.session


def pair_mask(
    private: "X25519PrivateKey", client: int, other: PublicKeys, session: bytes, size: int
) -> NDArray[np.uint64]:
    """What client `client`, whose mask key is `private`, adds for its pair with another one, uint64 [size]. The other
    one adds the same with the opposite sign, so that the sum of both has neither."""
    low, high = sorted((client, other.client))
    seed = masks.agreed(private, other.masking, b"mask %d and %d of " % (low, high) + session)
    pair = masks.mask(seed, size)
    return pair if client == low else np.uint64(0) - pair


def require_majority(threshold: int, clients: int) -> None:
    """Raises UsageError A02 unless `threshold` is a majority of the clients, and not more than there are."""
    if clients < 2 or not clients // 2 < threshold <= clients:
        raise UsageError(
            f"secure aggregation of {clients} clients with a threshold of {threshold}",
            where="federated.secure",
            likely="with half or fewer, two halves could unmask one client; with more than there are, nobody could",
            fix=f"a threshold from {clients // 2 + 1} to {clients}",
            code="A02",
        )


def require_enough(clients: int, threshold: int, did: str) -> None:
    """Raises UsageError A02 where fewer clients than the threshold are left."""
    if clients < threshold:
        what = f"{clients} clients {did}, and secure aggregation needs {threshold}: the round is lost"
        fix = "another round; a lower threshold, if so many drop out"
        raise UsageError(what, where="federated.secure", fix=fix, code="A02")
