"""Which virtual shards lie on which rank, and how their uses and terms are added up along one tree.

The tree is that of `comm/tree.py`. A rank holds an aligned block of the places below it, so what a rank adds up by
itself is a node, and the ranks' nodes are added along the rest of the same tree: the pairing, and with it every bit, is
the same for any number of ranks that divides the places.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from unisono.comm.group import Group
from unisono.comm.tree import tree_sum
from unisono.parallel.parts import Cut, ends_of
from unisono.parallel.tensor import Crossing, as_it_is


@dataclass(frozen=True, slots=True)
class VirtualDeal:
    """A fixed number of virtual shards of every width, of the heads, of the vocabulary and of the positions.

    tp deals the first three to its ranks, cp the positions: to each rank equally many that follow each other.
    """

    count: int
    tp: Group
    cp: Group

    @property
    def features(self) -> int:
        """Virtual shards of a width on this rank."""
        return self.count // self.tp.size

    @property
    def stretches(self) -> int:
        """Virtual shards of the positions on this rank."""
        return self.count // self.cp.size

    def sizes(self, full: int) -> list[int]:
        """Places of a width of `full` in each virtual shard of this rank; of all virtual shards, the first ones have
        one more where they cannot all have as many."""
        first = self.tp.index * self.features
        every = ends_of(full, self.count)[first : first + self.features + 1]
        return [end - start for start, end in pairwise(every)]

    def ends(self, full: int) -> list[int]:
        """Where the part of each rank of `tp` begins in a width of `full`, and its end."""
        return ends_of(full, self.count)[:: self.features]

    def cut(self, dim: int, full: int) -> Cut:
        """This rank's part of a parameter whose `dim` has `full` places."""
        start, end = self.ends(full)[self.tp.index : self.tp.index + 2]
        return Cut(dim, start, end - start, full)

    def along(self, x: Tensor, dim: int = 1) -> Sequence[Tensor]:
        """x [B, T', ...] → this rank's stretches of the positions, each by itself."""
        return [solid(part) for part in x.chunk(self.stretches, dim)]


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


def _summed(x: Tensor, group: Group) -> Tensor:
    return across(x, group).view_as(x)


def total(terms: Sequence[Tensor], group: Group) -> Tensor:
    """The sum of this rank's terms and of those of the others. All ranks go on alike, so each has the whole gradient of
    its terms."""
    here = tree_sum(terms)
    return Crossing.apply(here, group, _summed, as_it_is, here.dtype)  # type: ignore[return-value]


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
