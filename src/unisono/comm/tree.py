"""Sums along one fixed binary tree, whoever computes which part of it.

The tree over n leaves is the binary trie of their numbers: a node splits its leaves at the largest power of two below
their count. Every aligned block of 2^k leaves is a node, so ranks that hold such blocks compute nodes, and what they
combine is the same tree again. Floating-point addition is commutative to the bit, so only the pairing matters.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def split(n: int) -> int:
    """How many of n > 1 leaves go left: the largest power of two below n."""
    return 1 << ((n - 1).bit_length() - 1)


def tree_sum(parts: "Sequence[Tensor]") -> "Tensor":
    """The sum of parts along the tree over their places; a new tensor unless there is one part. Parts stay."""
    if len(parts) == 1:
        return parts[0]
    k = split(len(parts))
    left, right = tree_sum(parts[:k]), tree_sum(parts[k:])
    return left.add_(right) if k > 1 else left + right


def branch_sum(branches: "Mapping[tuple[int, int], Tensor]", low: int, high: int) -> "Tensor":
    """The sum of the leaves [low, high) along the tree. branches: sums of whole branches, by their leaves, which
    together are all of it. A new tensor unless it is a branch itself. Branches stay."""
    if (low, high) in branches:
        return branches[low, high]
    middle = low + split(high - low)
    left, right = branch_sum(branches, low, middle), branch_sum(branches, middle, high)
    return left + right if (low, middle) in branches else left.add_(right)


def fold_(x: "Tensor") -> "Tensor":
    """Sum of the last dim, [..., n] → [...], by halving: each round adds the far half onto the near one; x is used up.
    Element-wise additions alone, so an entry's bits do not depend on how many rows there are, as those of `sum` may."""
    n = x.shape[-1]
    if n <= 1:
        return x.sum(-1)
    while n > 1:
        k = split(n)
        x[..., : n - k] += x[..., k:n]
        n = k
    return x[..., 0]


class TreeSum:
    """Adds up leaves that arrive one after the other, in any order, along the tree over `count` leaves.

    Holds at most one partial sum per level when leaves arrive in order. `add` may keep and overwrite what it is given.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._nodes: dict[tuple[int, int], Tensor] = {}

    def add(self, leaf: int, x: "Tensor") -> "Tensor | None":
        """Take in one leaf; returns the whole sum with the last one, and forgets it."""
        node = (leaf, leaf + 1)
        while node != (0, self.count):
            parent, left, right = self._family(node)
            sibling = self._nodes.pop(right if node == left else left, None)
            if sibling is None:
                self._nodes[node] = x
                return None
            x = sibling.add_(x)
            node = parent
        return x

    def take(self, leaf: int, x: "Tensor") -> None:
        """Take in one leaf, and keep the whole sum too until `close`."""
        whole = self.add(leaf, x)
        if whole is not None:
            self._nodes[0, self.count] = whole

    def close(self) -> "Tensor | None":
        """The sum of the leaves that came, absent ones counting as nothing; None if none came. Forgets them."""
        whole = self._gather(0, self.count)
        self._nodes.clear()
        return whole

    def _gather(self, low: int, high: int) -> "Tensor | None":
        node = self._nodes.get((low, high))
        if node is not None or high - low == 1:
            return node
        middle = low + split(high - low)
        left, right = self._gather(low, middle), self._gather(middle, high)
        if left is None or right is None:
            return right if left is None else left
        return left.add_(right)

    def _family(self, node: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """(parent, its left child, its right child) of a node that is not the root."""
        low, high = 0, self.count
        while True:
            middle = low + split(high - low)
            if node in ((low, middle), (middle, high)):
                return (low, high), (low, middle), (middle, high)
            low, high = (low, middle) if node[1] <= middle else (middle, high)
