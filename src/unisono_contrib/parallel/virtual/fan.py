"""Uses and terms that are added up along one tree, here and over the ranks of a group.

The tree is that of `comm/tree.py`. A rank holds an aligned block of the places below it, so what a rank adds up by
itself is a node, and the ranks' nodes are added along the rest of the same tree: the pairing, and with it every bit, is
the same for any number of ranks that divides the places.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.comm.group import Group
from unisono.comm.tree import tree_sum


def across(x: Tensor, group: Group) -> Tensor:
    """The sum of every rank's x along the tree over the ranks; all have it. Every member calls it, or it hangs."""
    if group.size == 1:
        return x
    return tree_sum(group.all_gather(x.contiguous().unsqueeze(0)).unbind(0))


class Fan(torch.autograd.Function):
    """One tensor for `uses` uses on each rank of the group; its gradient is the tree's sum of those of all uses."""

    @staticmethod
    def forward(ctx, x, uses, group):  # type: ignore[override]
        ctx.group = group
        return tuple(x.view_as(x) for _ in range(uses))

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[override]
        return across(tree_sum([grad.contiguous() for grad in grads]), ctx.group), None, None


def fan(x: Tensor, uses: int, group: Group) -> Sequence[Tensor]:
    """`uses` aliases of x, one for each of this rank's uses of it."""
    return Fan.apply(x, uses, group)  # type: ignore[return-value]


class SummedAcross(torch.autograd.Function):
    """The tree's sum of every rank's x; all ranks go on alike, so each has the whole gradient of its term."""

    @staticmethod
    def forward(ctx, x, group):  # type: ignore[override]
        return across(x, group).view_as(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return grad, None


def total(terms: Sequence[Tensor], group: Group) -> Tensor:
    """The sum of this rank's terms and of those of the others."""
    return SummedAcross.apply(tree_sum(terms), group)  # type: ignore[return-value]


class Solid(torch.autograd.Function):
    """A tensor without gaps, and a gradient without gaps: a product may round by how its factors lie in memory."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[override]
        return x.view_as(x) if x.is_contiguous() else x.contiguous()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return grad.contiguous()


def solid(x: Tensor) -> Tensor:
    """See `Solid`."""
    return Solid.apply(x)  # type: ignore[return-value]
