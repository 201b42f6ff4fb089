"""Differential privacy of whole clients in federated rounds (McMahan et al., "Learning differentially private recurrent
language models", 2018): a delta is clipped, and noise is added once a round to their mean.

    clipped = [clip_delta(delta, 0.5) for delta in deltas]
    mean = combine(clipped, weights)                # sum of weight / total · clipped
    noised = add_noise(mean, client_noise(...), key, number)

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


def sensitivity(bound: float, weights: Sequence[float], total: float) -> float:
    """How far one client moves the weighted sum Σ weight / total · delta, in 2-norm, by taking part or not.

    It is bound · max(weights) / total: a client with many samples moves it more than bound / n, and the noise must hide
    the largest one. bound: of each delta's norm. weights: of all clients that might take part, positive; not only of
    this round's. total: by what the weighted sum is divided. It must not depend on who takes part in the round: the
    expected total weight of a round, or one that is fixed. `sensitivity(0.5, [10, 990], 1000)` is 0.495. Raises
    UsageError C02 for values out of range."""
    if not weights or min(weights) <= 0.0 or total <= 0.0 or not bound > 0.0:
        what = f"the sensitivity of a sum with bound {bound}, total {total} and {len(weights)} weights"
        raise UsageError(what, where="privacy", fix="positive numbers", code="C02")
    return bound * max(weights) / total


@torch.no_grad()
def add_noise(total: Tensor, deviation: float, key: bytes, number: int, name: str = "delta") -> Tensor:
    """total [d] plus normal noise of standard deviation `deviation` (noise · sensitivity), drawn once in round
    `number`: the same key, round and name give the same noise. A new tensor, of the same dtype."""
    if deviation == 0.0:
        return total.clone()
    drawn = torch.from_numpy(normals(key, "client", number, name, total.numel()))
    return (total.double() + deviation * drawn.view_as(total).to(total.device)).to(total.dtype)
