"""Shamir's secret sharing (1979): any `threshold` shares give a secret back, fewer say nothing about it."""

import secrets
from collections.abc import Mapping, Sequence

PRIME = 2**521 - 1
"""Of the field; a secret of 64 bytes fits."""


def split(secret: int, holders: Sequence[int], threshold: int) -> dict[int, int]:
    """holder → its share. holders: different numbers from 1. Raises ValueError where the secret would be lost, or
    known to a holder."""
    if not 0 <= secret < PRIME or not 1 <= threshold <= len(holders):
        raise ValueError(f"a secret below {PRIME} and a threshold of 1 to {len(holders)}, not {threshold}")
    if min(holders) < 1 or len({*holders}) < len(holders):
        raise ValueError("holders are different numbers from 1: the share of 0 is the secret")
    coefficients = [secret, *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {x: _value(coefficients, x) for x in holders}


def _value(coefficients: Sequence[int], x: int) -> int:
    """The polynomial at x, by Horner's rule."""
    y = 0
    for c in reversed(coefficients):
        y = (y * x + c) % PRIME
    return y


def weights_at_zero(holders: Sequence[int]) -> dict[int, int]:
    """holder → what its share counts for (Lagrange). The same for all secrets that these holders share."""
    weights = {}
    for x in holders:
        above = below = 1
        for other in holders:
            if other != x:
                above, below = above * other % PRIME, below * (other - x) % PRIME
        weights[x] = above * pow(below, -1, PRIME) % PRIME
    return weights


def joined(shares: Mapping[int, int], weights: Mapping[int, int]) -> int:
    """The secret, of the shares of exactly those holders that `weights` was made for; nonsense where these are fewer
    than the threshold."""
    return sum(weights[x] * share for x, share in shares.items()) % PRIME
