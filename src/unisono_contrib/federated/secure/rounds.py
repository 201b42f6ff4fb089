"""One secure round from its server's side: four exchanges with clients, wherever they are, and the sum of those that
stayed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unisono_contrib.federated.secure.messages import Advertise, Mask, Request, Reveal, Share
from unisono_contrib.federated.secure.server import directory_of, routed, survivors_of, total
from unisono_contrib.federated.secure.terms import SecureTerms

Exchange = Callable[[Mapping[int, Request]], Mapping[int, Any]]
"""Requests by client → the replies that came, by client, in the order of the requests; of a client that has dropped
out, none."""


@dataclass(frozen=True, slots=True)
class SecureSum:
    """delta: the weighted mean of the survivors' deltas, float64 [d]. survivors: clients whose vectors are in it.
    received: bytes of all vectors, keys and shares that the server got."""

    delta: Tensor
    survivors: tuple[int, ...]
    received: int


def secure_sum(
    exchange: Exchange, weights: Mapping[int, float], terms: SecureTerms, number: int
) -> SecureSum:
    """weights: what each client of the round counts for, by its number from 0; they add up to 1. number: of the round.
    Raises UsageError A01 where a client's number is beyond the limit, A02 where too few clients are left, A03 where
    what they reveal does not fit."""
    needed = terms.needed(len(weights))  # of all that began the round, however many leave
    terms.require_sum(len(weights))
    keys = exchange({client: Advertise(needed) for client in weights})
    directory = directory_of(keys.values(), needed)
    others = len(directory) - 1
    came = exchange({client: Share(directory, weights[client]) for client in keys})
    sealed = {  # who leaves a receiver out would have masks that do not cancel
        client: batch
        for client, batch in came.items()
        if len({letter.receiver for letter in batch} & (directory.keys() - {client + 1})) == others
    }
    letters = routed(sealed.values(), needed)
    came = exchange({client: Mask(letters[client + 1]) for client in sealed})
    masked = {client: each for client, each in came.items() if each.vector.shape == (terms.numel,)}
    alive = survivors_of(masked.values(), needed)
    revealed = exchange({client: Reveal(alive) for client in masked})
    session = terms.session(number)
    words = total(list(masked.values()), list(revealed.values()), directory, needed, session)
    delta, survivors = terms.decoded(words), tuple(masked)
    if len(survivors) < len(weights):
        delta = delta / sum(weights[client] for client in survivors)
    replies = [*keys.values(), *masked.values(), *revealed.values()]
    received = sum(each.nbytes for each in replies) + sum(
        x.nbytes for batch in sealed.values() for x in batch
    )
    return SecureSum(delta, survivors, received)
