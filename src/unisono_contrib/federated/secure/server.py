"""The server of one secure round: it passes messages on, and takes the masks off the sum."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from unisono.spec.errors import UsageError
from unisono_contrib.federated.secure import masks, shamir
from unisono_contrib.federated.secure.client import pair_mask, require_enough, require_majority
from unisono_contrib.federated.secure.messages import Masked, PublicKeys, Revealed, Sealed


def directory_of(keys: Iterable[PublicKeys], threshold: int) -> dict[int, PublicKeys]:
    """Everybody's public keys, by client, for everybody. Raises UsageError A02 where `threshold` is no majority of
    them, A03 where two have one number."""
    listed = list(keys)
    directory = {each.client: each for each in listed}
    if len(directory) < len(listed) or any(number < 1 for number in directory):
        what = f"the clients of a secure round are numbered {[each.client for each in listed]}"
        raise UsageError(what, where="federated.secure", fix="different numbers from 1", code="A03")
    require_majority(threshold, len(directory))
    return directory


def routed(sealed: Iterable[Sequence[Sealed]], threshold: int) -> dict[int, list[Sealed]]:
    """The messages by receiver. sealed: of each client that has shared. A client that has not takes part no longer, and
    is no receiver. Raises UsageError A02 where they are fewer than the threshold."""
    batches = [list(batch) for batch in sealed]
    senders = {batch[0].sender for batch in batches if batch}
    require_enough(len(senders), threshold, "have shared their keys")
    return {
        number: [m for batch in batches for m in batch if m.receiver == number] for number in sorted(senders)
    }


def survivors_of(masked: Iterable[Masked], threshold: int) -> frozenset[int]:
    """The clients whose vectors came. Raises UsageError A02 where they are fewer than the threshold."""
    survivors = frozenset(each.client for each in masked)
    require_enough(len(survivors), threshold, "have sent their vectors")
    return survivors


def total(
    masked: Sequence[Masked],
    revealed: Sequence[Revealed],
    directory: Mapping[int, PublicKeys],
    threshold: int,
    session: bytes = b"",
) -> NDArray[np.uint64]:
    """The sum of the survivors' vectors modulo 2^64, uint64 [d], to the bit. masked: of all survivors. revealed: of at
    least `threshold` of them. Raises UsageError A02 where they are fewer, A03 where what they reveal does not fit."""
    survivors = survivors_of(masked, threshold)
    answers = [each for each in revealed if each.client in survivors][:threshold]
    require_enough(len(answers), threshold, "have revealed their shares")
    weights = shamir.weights_at_zero([each.client for each in answers])
    out = np.zeros_like(masked[0].vector)
    for each in masked:
        out = out + each.vector
    for number in sorted(survivors):
        seed = _secret({each.client: each.self_masks.get(number) for each in answers}, weights, number)
        out = out - masks.mask(seed, len(out))
    for number in sorted(answers[0].keys):
        key = masks.key_of(_secret({each.client: each.keys.get(number) for each in answers}, weights, number))
        if key.public_key().public_bytes_raw() != directory[number].masking:
            raise _unfit(number)
        for other in sorted(survivors):  # the two halves of a pair cancel
            out = out + pair_mask(key, number, directory[other], session, len(out))
    return out


def _secret(shares: Mapping[int, int | None], weights: Mapping[int, int], number: int) -> bytes:
    """32 bytes that clients have shared of client `number`. Raises UsageError A03."""
    there = {holder: share for holder, share in shares.items() if share is not None}
    if len(there) < len(weights) or (secret := shamir.joined(there, weights)) >> (8 * masks.KEY_BYTES):
        raise _unfit(number)
    return secret.to_bytes(masks.KEY_BYTES, "big")


def _unfit(number: int) -> UsageError:
    what = f"the shares that clients reveal of client {number} do not give its secret"
    fix = "another round: a client has sent wrong shares, or the threshold differs between clients and server"
    return UsageError(what, where="federated.secure", fix=fix, code="A03")
