"""What every aggregate owes: deltas that are alike are their own aggregate, in whatever order clients come."""

from collections.abc import Iterator
from pathlib import Path

import torch

from unisono_contrib.spec.federated import Aggregate

_CLIENTS, _NUMEL, _NEAR = 23, 7, 1e-12


def faults(member: Aggregate, folder: Path, text: str = "") -> Iterator[str]:
    """What is wrong with an aggregate, a sentence each: 1. It gives float64 [d] and changes nothing that it is given.
    2. Deltas that are all alike are their own aggregate. 3. The order of clients changes no more than rounding, but
    for `ties`. 4. One that is `linear` is the mean by weight."""
    generator = torch.Generator().manual_seed(0)
    deltas = torch.randn(_CLIENTS, _NUMEL, generator=generator, dtype=torch.float64)
    weights = torch.rand(_CLIENTS, generator=generator, dtype=torch.float64) + 0.5
    before = deltas.clone(), weights.clone()
    whole = member.combine(deltas, weights)
    if whole.shape != (_NUMEL,) or whole.dtype != torch.float64:
        yield f"of deltas float64 [n, d] it makes {whole.dtype} {list(whole.shape)}"
        return
    if not (torch.equal(deltas, before[0]) and torch.equal(weights, before[1])):
        yield "it changes the deltas or the weights that it is given"
        deltas, weights = before
    alike = deltas[:1].expand(_CLIENTS, -1).clone()
    if not torch.allclose(member.combine(alike, weights), alike[0], rtol=_NEAR, atol=_NEAR):
        yield "of deltas that are all alike it makes another one"
    turned = torch.arange(_CLIENTS) if member.ties else torch.randperm(_CLIENTS, generator=generator)
    if not torch.allclose(member.combine(deltas[turned], weights[turned]), whole, rtol=_NEAR, atol=_NEAR):
        yield "its result depends on the order of clients"
    mean = (deltas * weights[:, None]).sum(0) / weights.sum()
    if member.linear and not torch.allclose(whole, mean, rtol=_NEAR, atol=_NEAR):
        yield "it says that it is linear, and is not the mean of deltas by weight"
