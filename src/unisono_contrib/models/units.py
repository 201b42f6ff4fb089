"""A graph as a chain of units: cut where little crosses, and where nothing that crosses is dealt by `tp`.

A unit is a module of its own that runs a stretch of the graph. What later units need crosses as a carry of several
tensors: skip connections, masks, a second input. What depends on no input and no weight, such as a causal mask, is made
again where it is needed instead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.fx import Node

from unisono_contrib.models.axes import is_tensor, packet
from unisono_contrib.models.deals import PRODUCTS, GraphWalk, sizes
from unisono_contrib.models.traced import BATCH, Traced

MOST = 64  # units of one model
_SLACK, _NEAR = 2.0, 4  # a cut may carry so much more than the cheapest of so many beside it


@dataclass(frozen=True, slots=True)
class Stretch:
    """A unit of the graph: its operators, and what it is handed and hands on."""

    nodes: tuple[Node, ...]
    entries: tuple[Node, ...]
    exits: tuple[Node, ...]


def is_size(node: Node) -> bool:
    """Whether a node's value is a number that follows from the number of samples."""
    return isinstance(node.meta.get("val"), (torch.SymInt, int)) and node.op == "call_function"


def free_nodes(graph: Traced) -> set[Node]:
    """Calls that depend on no input, no parameter and no buffer that is written to."""
    held = {graph.input, *graph.parameters}
    written = {b for b in graph.buffers for user in b.users if packet(user) in ("batch_norm", "add_")}
    bound, free = held | written, set()
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        if is_size(node) or not any(n in bound for n in node.all_input_nodes if not is_size(n)):
            free.add(node)
        else:
            bound.add(node)
    return free


def stretches(graph: Traced, walk: GraphWalk, chosen: Sequence[int]) -> list[Stretch]:
    """The graph, cut."""
    free = free_nodes(graph)
    main = [n for n in graph.graph.nodes if n.op == "call_function" and n not in free]
    at = {n: i for i, n in enumerate(main)} | {graph.input: -1}
    last = _last_uses(graph, at, len(main))
    values = (graph.input, *main)
    crossing = [[n for n in values if at[n] <= i < last.get(n, -2)] for i in range(len(main) - 1)]
    ends = [i for i in _ends(main, crossing, graph, walk, chosen, at) if i < len(main) - 1]
    cuts = [-1, *ends, len(main) - 1]
    parts = []
    for start, end in pairwise(cuts):
        entries = [graph.input] if start < 0 else crossing[start]
        exits = graph.outputs if end == len(main) - 1 else crossing[end]
        parts.append(Stretch(tuple(main[start + 1 : end + 1]), tuple(entries), tuple(exits)))
    return parts


def _last_uses(graph: Traced, at: Mapping[Node, int], end: int) -> dict[Node, int]:
    """Where each value is used for the last time; a free node's operands where it is used."""
    last = dict.fromkeys(graph.outputs, end)
    for node in at:
        for user in node.users:
            if user in at:
                last[node] = max(last.get(node, -2), at[user])
    return last


def _ends(
    main: Sequence[Node],
    crossing: Sequence[Sequence[Node]],
    graph: Traced,
    walk: GraphWalk,
    chosen: Sequence[int],
    at: Mapping[Node, int],
) -> list[int]:
    """The operators after which the graph is cut."""
    products = [i for i, n in enumerate(main) if _weighs(n, graph)]
    locked = _locked(graph, at)

    def cost(i: int) -> float:
        values = crossing[i]
        legal = i not in locked and values and all(is_tensor(v) and not walk.dealt(v, chosen) for v in values)
        return float(sum(_numel(v) for v in values)) if legal else float("inf")

    best: list[tuple[int, float]] = []
    for a, b in pairwise(products):
        price, place = min((cost(i), -i) for i in range(a, b))
        if price < float("inf"):
            best.append((-place, price))
    best = _cheap(best)
    while len(best) >= MOST:
        spans = list(pairwise([-1, *(i for i, _ in best)]))
        work = [_multiplied(main[a + 1 : b + 1], walk) for a, b in spans]
        best.pop(work.index(min(work)))
    return [i for i, _ in best]


def _weighs(node: Node, graph: Traced) -> bool:
    """Whether an operator multiplies by a parameter, or looks up its rows."""
    return packet(node) in {*PRODUCTS, "embedding"} and any(
        p in graph.parameters for p in node.all_input_nodes
    )


def _cheap(best: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Without peaks: places that carry much more than some before them and some behind them."""
    kept = []
    for i, (place, price) in enumerate(best):
        before = min((p for _, p in best[max(0, i - _NEAR) : i]), default=price)
        behind = min((p for _, p in best[i + 1 : i + 1 + _NEAR]), default=price)
        if price <= _SLACK * max(before, behind):
            kept.append((place, price))
    return kept


def _locked(graph: Traced, at: Mapping[Node, int]) -> set[int]:
    """Places inside of the uses of a weight that is used more than twice: two units can share a weight, no more."""
    axes: set[int] = set()
    for parameter in graph.parameters:
        uses = sorted(at[u] for u in parameter.users if u in at)
        if len(uses) > 2:
            axes |= set(range(uses[0], uses[-1]))
    return axes


def _numel(node: Node) -> int:
    return int(torch.Size(sizes(node.meta["val"])).numel()) // BATCH or 1


def _multiplied(nodes: Sequence[Node], walk: GraphWalk) -> float:
    """Multiplications of a sample."""
    return sum(walk.axes.size(walk.seen(n)) / BATCH for n in nodes if packet(n) in PRODUCTS)


def multiplied(stretch: Stretch, walk: GraphWalk) -> float:
    """Multiplications of a sample in a stretch."""
    return _multiplied(stretch.nodes, walk)


def additions(stretch: Stretch, walk: GraphWalk) -> int:
    """Additions on the longest way through a stretch, forward and backward, if its operators stood in one line."""
    count = 0
    for node in stretch.nodes:
        name, axes = packet(node), walk.axes
        if walk.summed.get(node):
            out = max((axes.size(d) for d in walk.of(node)), default=1)
            count += axes.size(axes.known(walk.summed[node])) + out
        elif any(word in name for word in ("norm", "softmax", "attention", "mean", "pool")):
            dims = (d for n in node.all_input_nodes if is_tensor(n) for d in walk.of(n))
            count += 4 * max(map(axes.size, dims), default=1) + 60 * ("norm" in name)
        else:
            count += 1
    return count


def uses(stretch: Stretch, graph: Traced, free: set[Node]) -> list[Node]:
    """The parameters of a stretch, in the order of the module."""
    seen: set[Node] = set()
    todo: list[Node] = [n for node in stretch.nodes for n in node.all_input_nodes]
    while todo:
        node = todo.pop()
        if node in free and node not in seen:
            todo += node.all_input_nodes
        seen.add(node)
    return [p for p in graph.parameters if p in seen]
