"""Two levels of ranks, such as rows and columns, or nodes and what is in them: an operation of one inside the other.

A reduce-scatter goes inside the rows first, so that what crosses between rows is the part of one rank and no more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from unisono.programs.collectives import Inward, Rounds, among, backwards, beside

Nodes = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class InwardLevel:
    """How ranks of one level bring together: rounds of so many ranks, each with one block."""

    reduce_scatter: Inward
    gather: Inward
    all_to_all: Inward


def levelled(nodes: Nodes, inner: InwardLevel, outer: InwardLevel) -> dict[str, Inward]:
    """Operations of nodes of one size, their ranks in order; a reduce is left to the algorithm."""
    return {
        "gather": lambda _: gather(nodes, inner, outer),
        "reduce_scatter": lambda _: reduce_scatter(nodes, inner, outer),
        "all_to_all": lambda _: _all_to_all(nodes, inner, outer),
        "all_reduce": lambda _: _all_reduce(nodes, inner, outer),
    }


def reduce_scatter(nodes: Nodes, inner: InwardLevel, outer: InwardLevel) -> Rounds:
    """Inside each node, rank l gets the blocks of all l-th ranks; these then meet."""
    columns = list(zip(*nodes, strict=True))
    return _inside(nodes, inner.reduce_scatter, lambda _: columns) + beside(
        [among(outer.reduce_scatter(len(nodes)), column, [(b,) for b in column]) for column in columns]
    )


def gather(nodes: Nodes, inner: InwardLevel, outer: InwardLevel) -> Rounds:
    """To the first of each node, and from these to the first of all."""
    leaders = [node[0] for node in nodes]
    inside = _inside(nodes, inner.gather, lambda node: [(b,) for b in node])
    return inside + among(outer.gather(len(nodes)), leaders, nodes)


def _all_reduce(nodes: Nodes, inner: InwardLevel, outer: InwardLevel) -> Rounds:
    """As a reduce-scatter and an all-gather; but nobody asks which block is whose, so those of a rank lie together."""
    rounds = reduce_scatter(nodes, inner, outer)
    # The blocks of the l-th ranks become the l-th run of blocks.
    order = {block: at for at, block in enumerate(chain.from_iterable(zip(*nodes, strict=True)))}
    size = len(order)
    rounds = among(rounds, range(size), [(order[block],) for block in range(size)])
    return rounds + backwards(rounds)


def _all_to_all(nodes: Nodes, inner: InwardLevel, outer: InwardLevel) -> Rounds:
    """Inside each node, to the rank at the place that the receiver has in its own; then between the nodes."""
    size, width = sum(map(len, nodes)), len(nodes[0])
    columns = list(zip(*nodes, strict=True))

    def to_columns(node: Sequence[int]) -> list[tuple[int, ...]]:
        pairs = ((node[i], columns[j]) for i in range(width) for j in range(width))
        return [tuple(sorted(source * size + to for to in column)) for source, column in pairs]

    def to_rows(column: Sequence[int]) -> list[tuple[int, ...]]:
        pairs = ((nodes[i], column[j]) for i in range(len(nodes)) for j in range(len(nodes)))
        return [tuple(sorted(source * size + to for source in node)) for node, to in pairs]

    return _inside(nodes, inner.all_to_all, to_columns) + beside(
        [among(outer.all_to_all(len(nodes)), column, to_rows(column)) for column in columns]
    )


def _inside(nodes: Nodes, way: Inward, chunks: Callable[[Sequence[int]], Sequence[Sequence[int]]]) -> Rounds:
    """The same in every node, side by side."""
    return beside([among(way(len(node)), node, chunks(node)) for node in nodes])
