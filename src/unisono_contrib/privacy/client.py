"""Differential privacy of whole clients in federated rounds (McMahan et al., "Learning differentially private recurrent
language models", 2018): a delta is clipped, and noise is added once a round to their mean.

    clipped = [clip_delta(delta, 0.5) for delta in deltas]
    mean = ...                                           # Σ share · clipped
    noised = add_noise(mean, 1.1 * sensitivity(0.5, shares), key, number)

A round's mean is public; what a client sent is seen by the server, unless aggregation is secure.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.spec.errors import UsageError
from unisono_contrib.privacy.stream import normals


@torch.no_grad()
def clip_delta(delta: Tensor, bound: float) -> Tensor:
    """delta [d] scaled so that its 2-norm is at most `bound`; zeros where it has a number that is none, for its norm
    bounds nothing. A new tensor."""
    norm = float(delta.double().norm())
    if not math.isfinite(norm):
        return torch.zeros_like(delta)
    return delta * min(1.0, bound / norm) if norm > 0.0 else delta.clone()


def sensitivity(bound: float, shares: Sequence[float]) -> float:
    """How far one client moves the weighted mean Σ share · delta of a round, in 2-norm: bound · max(shares).

    Two rounds are neighbours if one client's delta is zero in one of them; its share stays. A client with many samples
    moves the mean by more than bound / n, and the noise must hide the largest. bound: of each delta's norm. shares:
    weights of the round over their sum. `sensitivity(0.5, [0.01, 0.99])` is 0.495. Raises UsageError C02 for values out
    of range."""
    if not shares or min(shares) < 0.0 or max(shares) > 1.0 or not bound > 0.0:
        what = f"the sensitivity of a mean with bound {bound} and shares {list(shares)[:5]}"
        raise UsageError(what, where="privacy", fix="a positive bound, and shares from 0 to 1", code="C02")
    return bound * max(shares)


@torch.no_grad()
def add_noise(total: Tensor, deviation: float, key: bytes, number: int, name: str = "delta") -> Tensor:
    """total [d] plus normal noise of standard deviation `deviation` (noise · sensitivity), drawn once in round
    `number`: the same key, round and name give the same noise. A new tensor, of the same dtype."""
    if deviation == 0.0:
        return total.clone()
    drawn = torch.from_numpy(normals(key, "client", number, name, total.numel()))
    return (total.double() + deviation * drawn.view_as(total).to(total.device)).to(total.dtype)
