"""Inside nodes first, then between them: of what one node has for the others, each byte crosses the slow links once.

Nodes of one size: each rank adds up its part inside the node, at once from all; the parts meet in rings between nodes.
Nodes of several sizes: the first rank of each stands for it.
"""

from collections.abc import Sequence

from unisono.programs.collectives import (
    ROOTED,
    Inward,
    Program,
    Rounds,
    among,
    backwards,
    beside,
    completed,
    direct,
    placed,
    ring,
    tree,
)
from unisono.programs.collectives.levels import InwardLevel, Nodes, levelled


def program(
    op: str, size: int, root: int = 0, pieces: int = 1, nodes: Sequence[Sequence[int]] | None = None
) -> Program:
    """An operation of `size` ranks. nodes: the ranks of each; all are in one if None."""
    nodes = nodes or [range(size)]
    if len({len(node) for node in nodes}) == 1:
        inner = InwardLevel(
            direct_rounds("reduce_scatter"), direct_rounds("gather"), direct_rounds("all_to_all")
        )
        inward = levelled(nodes, inner, InwardLevel(ring.reduce_scatter, ring.gather, ring.all_to_all))
    else:
        inward = _by_leaders(nodes)
    inward["reduce"] = lambda _: _to_leaders(nodes) + _between(nodes, tree.reduce(len(nodes)))
    if op not in ROOTED:
        return placed(op, size, completed(op, size, inward), root)
    # The root's node is the first, and the root the first in it; the others stay where they are.
    first = next(node for node in nodes if root in node)
    turned = [[root, *(r for r in first if r != root)], *(list(node) for node in nodes if node is not first)]
    inward["gather"] = lambda _: _gather(turned)
    inward["reduce"] = lambda _: _to_leaders(turned) + _between(turned, tree.reduce(len(turned)))
    return Program(op, size, size, tuple(turn for turn in completed(op, size, inward) if turn), root)


def direct_rounds(op: str) -> Inward:
    """Rounds of one operation by direct messages, of so many ranks."""
    return lambda size: direct.program(op, size).rounds


def _gather(nodes: Nodes) -> Rounds:
    inside = [among(direct_rounds("gather")(len(node)), node, [(rank,) for rank in node]) for node in nodes]
    return beside(inside) + among(ring.gather(len(nodes)), [node[0] for node in nodes], nodes)


def _to_leaders(nodes: Nodes) -> Rounds:
    """The sum of each node, whole, on its first rank."""
    size = sum(map(len, nodes))
    every = tuple(range(size))
    return beside([among(tree.reduce(len(node)), node, [every, *[()] * (len(node) - 1)]) for node in nodes])


def _between(nodes: Nodes, rounds: Rounds) -> Rounds:
    """These rounds between the first of all nodes, for whom a block is that of the whole node."""
    return among(rounds, [node[0] for node in nodes], nodes)


def _by_leaders(nodes: Nodes) -> dict[str, Inward]:
    met = _between(nodes, ring.reduce_scatter(len(nodes)))
    inside = [among(direct_rounds("gather")(len(node)), node, [(rank,) for rank in node]) for node in nodes]
    return {
        "gather": lambda _: _gather(nodes),
        "reduce_scatter": lambda _: _to_leaders(nodes) + met + backwards(beside(inside)),
        "all_reduce": lambda _: _to_leaders(nodes) + met + backwards(met) + backwards(_to_leaders(nodes)),
        "all_to_all": direct_rounds("all_to_all"),
    }
