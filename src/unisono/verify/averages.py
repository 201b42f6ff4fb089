"""Averages of weights, held to those of one device and to their formula: average += share * (weights - average)."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from unisono.verify.record import Record

_ROUNDINGS = 4  # of the formula, counted generously


def no_average(update: int) -> float:
    """The share of a run that keeps none."""
    return 0.0


def tolerance_of(
    share: float, ref: Record, of_weights: Callable[[str, Tensor], Tensor]
) -> Callable[[str, Tensor], Tensor]:
    """(key, the right average) → absolute tolerance of each entry: what the weights may be off by, as far as averages
    follow them, and rounding. of_weights: the same of weights."""

    def tolerance(key: str, want: Tensor) -> Tensor:
        model = key.replace("ema/", "model/", 1)
        weights, rounding = ref.whole(model), _ROUNDINGS * torch.finfo(want.dtype).eps
        return (
            share * of_weights(model, want if weights is None else weights) + rounding * want.double().abs()
        )

    return tolerance


def laws(
    share: float, ref: Record, before: Record | None, seen: Record
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """(key, average, what follows from the average before and from the weights that `seen` has, absolute tolerance).
    before: the reference's record of the step before, None at step 0, where averages begin at the weights."""
    last, kind = (ref, "init") if before is None else (before, "ema")
    for key in seen.names("ema"):
        name = key.partition("/")[2]
        old, new, got = last.whole(f"{kind}/{name}"), seen.whole(f"model/{name}"), seen.whole(key)
        if got is None or old is None or new is None:
            continue
        old, new = old.double(), new.double()
        room = _ROUNDINGS * torch.finfo(got.dtype).eps * (old.abs() + new.abs())
        yield key, got, old + share * (new - old), room
