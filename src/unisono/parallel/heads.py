"""Heads of attention that a degree of `tp` does not divide: keys and values that several ranks' queries read.

Heads are dealt as evenly as may be. A key and its value belong to the rank of the last query that reads them, which
lends what it computes of them to the ranks of the earlier ones, and adds up their gradients (grouped queries, Ainslie
et al., 2023; copies of few keys on many ranks as in Megatron-LM, Shoeybi et al., 2019).

Shapes: B batch, T positions, R features of this rank's projection, K width of a head.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from unisono.comm.group import Group
from unisono.spec.layout import Units


@dataclass(frozen=True, slots=True)
class HeldHeads:
    """One rank's queries, and the keys that they read.

    counts: of each key, in order, how many of its queries are here. owner: index of the rank that has the last of these
    keys, None if it is here. first: features here before the first key that is here, which another rank borrows; None
    if none does.
    """

    counts: tuple[int, ...]
    owner: int | None
    first: int | None


def dealt_heads(units: Units, ends: list[int]) -> list[HeldHeads]:
    """What each rank holds. ends: rank i has the heads from ends[i] to before ends[i + 1], at least one."""
    held, group = [], units.group
    for start, end in pairwise(ends):
        keys = range(start // group, (end - 1) // group + 1)
        counts = tuple(min(end, (key + 1) * group) - max(start, key * group) for key in keys)
        last = (keys[-1] + 1) * group
        owner = next(i for i, e in enumerate(ends[1:]) if e >= last) if end < last else None
        lends = start % group and end >= (keys[0] + 1) * group
        held.append(HeldHeads(counts, owner, counts[0] * units.width if lends else None))
    return held


class LentKeys(torch.autograd.Function):
    """[B, T, R] → [B, T, R and a borrowed key and value behind], or as it is where nothing is borrowed. Every rank of
    the group calls it, forward and backward, or it hangs."""

    @staticmethod
    def forward(ctx, x_BTR, held, width, group):  # type: ignore[override]
        ctx.held, ctx.width, ctx.group = held, 2 * width, group
        nothing = x_BTR.new_zeros((*x_BTR.shape[:-1], ctx.width))
        kept = nothing if held.first is None else _lent(ctx, x_BTR)
        all_RBT = group.all_gather(kept.movedim(-1, 0))
        if held.owner is None:
            return x_BTR.view_as(x_BTR)
        return torch.cat((x_BTR, all_RBT.unflatten(0, (group.size, -1))[held.owner].movedim(0, -1)), -1)

    @staticmethod
    def backward(ctx, grad_BTR):  # type: ignore[override]
        held, group = ctx.held, ctx.group
        borrowed = 0 if held.owner is None else ctx.width
        kept = grad_BTR[..., : grad_BTR.shape[-1] - borrowed].clone()
        all_SRBT = grad_BTR.new_zeros((group.size, ctx.width, *grad_BTR.shape[:-1]))
        if borrowed:
            all_SRBT[held.owner] = grad_BTR[..., -borrowed:].movedim(-1, 0)
        summed_RBT = group.reduce_scatter(all_SRBT.flatten(0, 1))
        if held.first is not None:
            _lent(ctx, kept).add_(summed_RBT.movedim(0, -1))
        return kept, None, None, None


def _lent(ctx, x: Tensor) -> Tensor:
    return x.narrow(-1, ctx.held.first, ctx.width)


def with_lent_keys(x_BTR: Tensor, units: Units, held: list[HeldHeads], group: Group) -> Tensor:
    """A projection's features, with the key and value that this rank's last queries read and another rank computes."""
    if all(keys.owner is None for keys in held):
        return x_BTR
    return LentKeys.apply(x_BTR, held[group.index], units.width, group)  # type: ignore[return-value]
