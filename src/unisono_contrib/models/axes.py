"""Axes of the tensors of a graph: which dims run in the same direction, and of which factors the size of each is made.

A dim is a row of axes whose sizes multiply to its own: the features `3 * heads * width` of a fused projection are three
axes, a dim of size 1 is none. An operator says of its operands and of its result which axes are the same, so that after
one walk over the graph an axis is a class of dims that can only be dealt together. An axis over which an operator works
as a whole, such as that of a softmax, is barred.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.fx import Node

Dim = tuple[int, ...]  # axes by their numbers
Dims = tuple[Dim, ...]  # of a tensor


class Misfit(Exception):
    """Two dims whose sizes have no common factors: an operator sees them as they are, and nobody can deal them."""


@dataclass(slots=True)
class GraphAxes:
    """All axes of a graph. sizes: by number. parts: of an axis that has turned out to be another, or several. barred:
    why an axis may not be dealt."""

    sizes: list[int] = field(default_factory=list)
    parts: dict[int, Dim] = field(default_factory=dict)
    barred: dict[int, str] = field(default_factory=dict)

    def new(self, size: int) -> Dim:
        """A dim of one new axis."""
        if size == 1:
            return ()
        self.sizes.append(size)
        return (len(self.sizes) - 1,)

    def fresh(self, shape: Iterable[int]) -> Dims:
        """New axes for a whole tensor."""
        return tuple(self.new(size) for size in shape)

    def known(self, dim: Iterable[int]) -> Dim:
        """The axes of a dim, as far as they are told apart by now."""
        axes: list[int] = []
        for axis in dim:
            axes += self.known(self.parts[axis]) if axis in self.parts else (axis,)
        return tuple(axes)

    def size(self, dim: Iterable[int]) -> int:
        """Of a dim."""
        return prod(self.sizes[axis] for axis in dim)

    def bar(self, dims: Iterable[Iterable[int]], why: str) -> None:
        """Nobody may deal these."""
        for axis in {a for dim in dims for a in self.known(dim)}:
            self.barred.setdefault(axis, why)

    def factored(self, axis: int, first: int) -> Dim:
        """An axis as two, of which the outer one has `first` places. Raises Misfit."""
        if self.sizes[axis] % first:
            raise Misfit
        parts = (*self.new(first), *self.new(self.sizes[axis] // first))
        self._becomes(axis, parts)
        return parts

    def _becomes(self, axis: int, parts: Dim) -> None:
        self.parts[axis] = parts
        if axis in self.barred:
            self.bar((parts,), self.barred[axis])

    def same(self, left: Iterable[int], right: Iterable[int]) -> None:
        """Two dims of one size are the same direction. Raises Misfit."""
        a, b = list(self.known(left)), list(self.known(right))
        while a and b:
            first, other = a.pop(0), b.pop(0)
            if first == other:
                continue
            if self.sizes[first] == self.sizes[other]:
                self._becomes(first, (other,))
            elif self.sizes[first] > self.sizes[other]:
                a[:0], b[:0] = self.factored(first, self.sizes[other]), (other,)
            else:
                a[:0], b[:0] = (first,), self.factored(other, self.sizes[first])
            a, b = list(self.known(a)), list(self.known(b))
        if a or b:
            raise Misfit

    def regrouped(self, dims: Sequence[Dim], shape: Sequence[int]) -> Dims:
        """The dims of a view of another shape. Raises Misfit."""
        todo, out = [axis for dim in dims for axis in self.known(dim)], []
        for size in shape:
            dim: list[int] = []
            while size > 1:
                if not todo:
                    raise Misfit
                axis = todo.pop(0)
                size_here = self.sizes[axis]
                if size % size_here == 0:
                    dim.append(axis)
                    size //= size_here
                else:
                    outer, *inner = self.factored(axis, size)
                    dim.append(outer)
                    todo[:0] = inner
                    size = 1
            out.append(tuple(dim))
        if todo:
            raise Misfit
        return tuple(out)

    def folded(self, dim: Dim, size: int) -> tuple[Dim, Dim]:
        """A dim as (which piece, place inside of a piece of `size`). Raises Misfit."""
        full = self.size(self.known(dim))
        if full % size:
            raise Misfit
        outer, inner = self.regrouped((dim,), (full // size, size))
        return outer, inner


Results = list[Dims]


@dataclass(slots=True)
class OperatorCall:
    """One call of an operator. args: by the names of its schema. dims: of a value, None for what is no tensor.
    summed: axes over which it adds up, filled by its rule."""

    node: Node
    args: Mapping[str, Any]
    axes: GraphAxes
    dims: Callable[[Any], Dims]
    shapes: list[tuple[int, ...]]
    summed: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Such as `linear`."""
        return packet(self.node)

    @property
    def tensors(self) -> list[Node]:
        """Operands that are tensors."""
        return [n for n in self.node.all_input_nodes if is_tensor(n)]

    def whole(self, dims: Sequence[Sequence[int]]) -> None:
        """These have to be whole."""
        self.axes.bar(dims, f"{self.name} at {place_of(self.node)}")


def packet(node: Node) -> str:
    """The name of a node's operator, such as `linear`; of a Python function its own."""
    name = getattr(node.target, "overloadpacket", None)
    return str(name).rpartition(".")[2] if name is not None else getattr(node.target, "__name__", "")


def is_tensor(node: Any) -> bool:
    """Whether a node's value is a tensor."""
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def place_of(node: Node) -> str:
    """The module in which a node stands, as the user names it; else its line."""
    stack = node.meta.get("nn_module_stack") or {}
    name = next(reversed([path for path, _ in stack.values()]), "") if stack else ""
    return name or str(node.name)


def arguments(node: Node) -> dict[str, Any]:
    """A call's arguments by the names of its operator's schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return dict(enumerate(node.args)) | dict(node.kwargs)  # type: ignore[arg-type]
    named = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    return named | {a.name: v for a, v in zip(schema.arguments, node.args, strict=False)} | dict(node.kwargs)


def at_of(dim: int, dims: Sequence[Any]) -> int:
    return dim % len(dims)
