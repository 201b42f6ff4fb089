"""Which axes of a graph `tp` deals: a column product opens a dealt stretch of the graph, and a sum ends it.

An axis is dealt everywhere or nowhere. Where operators add up over it, ranks have terms of a sum; everywhere else each
rank has its part, and nothing is sent. So the hidden features between two linear layers, the heads of an attention
written out by hand, the channels between two convolutions and the rows of a vocabulary are found alike. Axes are chosen
greedily, by the multiplications that a rank saves and the numbers that it sends for them; no operator may meet two.
"""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from unisono.spec.layout import Units
from unisono_contrib.models.axes import Dims, GraphAxes, Misfit, OperatorCall, arguments, is_tensor, packet
from unisono_contrib.models.rules import rule_of
from unisono_contrib.models.traced import BATCH, Traced

SENT = 8.0  # multiplications that one number sent is counted as, when axes are compared
PRODUCTS = frozenset(
    "linear matmul mm bmm addmm baddbmm einsum conv1d conv2d conv3d conv_transpose1d conv_transpose2d"
    " conv_transpose3d scaled_dot_product_attention".split()
)
_UNFIT = (Misfit, ValueError, KeyError, IndexError, TypeError, AttributeError, StopIteration, RuntimeError)


@dataclass(frozen=True, slots=True)
class DealtDim:
    """What is dealt of one dim of a value: the middle one of `outer` pieces of `units.count` units of `units.width`."""

    axis: int
    dim: int
    outer: int
    units: Units


@dataclass(slots=True)
class GraphWalk:
    """The axes of every value of a graph. dims: by node; of a node with several results, a list. summed: by node, the
    axes over which it adds up. batch: the axis of samples."""

    axes: GraphAxes
    dims: dict[Node, Any] = field(default_factory=dict)
    summed: dict[Node, list[int]] = field(default_factory=dict)
    batch: int = -1

    def of(self, node: Any) -> Dims:
        """The dims of a tensor, as they are known by now."""
        if not isinstance(node, Node):
            return ()
        return tuple(self.axes.known(dim) for dim in self.dims.get(node, ()))

    def seen(self, node: Node) -> set[int]:
        """All axes that a call meets: those of operands and results, and those over which it adds up."""
        axes = {a for n in (node, *node.all_input_nodes) if is_tensor(n) for dim in self.of(n) for a in dim}
        for dims in self.dims[node] if isinstance(self.dims.get(node), list) else ():
            axes |= {a for dim in dims for a in self.axes.known(dim)}
        return axes | set(self.axes.known(self.summed.get(node, ())))

    def dealt(self, node: Any, chosen: Iterable[int]) -> DealtDim | None:
        """What of a value is dealt, None where it is whole."""
        for at, dim in enumerate(self.of(node)):
            for i, axis in enumerate(dim):
                if axis in chosen:
                    outer, inner = self.axes.size(dim[:i]), self.axes.size(dim[i + 1 :])
                    return DealtDim(axis, at, outer, Units(self.axes.sizes[axis], inner))
        return None


def sizes(value: Any) -> tuple[int, ...]:
    """The shape of a traced value, with BATCH samples."""
    return tuple(int(n.node.hint) if isinstance(n, torch.SymInt) else n for n in value.shape)


def walked(graph: Traced) -> GraphWalk:
    """One walk over the graph, operator by operator."""
    walk = GraphWalk(GraphAxes())
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            walk.dims[node] = walk.axes.fresh(sizes(value))
            if node is graph.input:
                walk.axes.bar(walk.dims[node], "the input is whole")
                walk.batch = walk.dims[node][0][0]
        elif node.op == "call_function":
            _step(node, value, walk)
    return walk


def _step(node: Node, value: Any, walk: GraphWalk) -> None:
    if node.target is operator.getitem:
        walk.dims[node] = walk.dims[node.args[0]][node.args[1]]  # type: ignore[index]
        return
    several = isinstance(value, (list, tuple))
    values = [v for v in (value if several else [value]) if isinstance(v, torch.Tensor)]
    if not values:
        return
    call = OperatorCall(node, arguments(node), walk.axes, walk.of, [sizes(v) for v in values])
    try:
        rule = rule_of(node)
        if rule is None:
            raise Misfit
        results = rule(call)
        for dims, shape in zip(results, call.shapes, strict=True):
            if tuple(walk.axes.size(walk.axes.known(d)) for d in dims) != shape:
                raise Misfit
    except _UNFIT:
        for operand in call.tensors:
            call.whole(walk.of(operand))
        call.summed.clear()
        results = [walk.axes.fresh(shape) for shape in call.shapes]
        for dims in results:
            call.whole(dims)
    walk.dims[node] = results if several else results[0]
    walk.summed[node] = call.summed


# The choice ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Worth:
    """What dealing an axis to two ranks would give. saved: multiplications of a sample. sent: numbers of a sample.
    held: elements of parameters that are dealt. products: operators that multiply and see it."""

    saved: float
    sent: float
    held: int
    products: int

    @property
    def gain(self) -> float:
        """Of one product: axes that few operators see leave others free, and places to cut between stages."""
        return (self.saved + self.held - SENT * self.sent) / max(1, self.products)


def chosen_axes(graph: Traced, walk: GraphWalk) -> tuple[int, ...]:
    """The axes that `tp` deals, the best ones first."""
    meets: dict[int, list[Node]] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function":
            for axis in walk.seen(node):
                meets.setdefault(axis, []).append(node)
    worth = {a: worth_of(a, nodes, graph, walk) for a, nodes in meets.items() if _may(a, nodes, graph, walk)}
    ranked = sorted((a for a in worth if worth[a].held and worth[a].gain > 0), key=lambda a: -worth[a].gain)
    chosen: list[int] = []
    for axis in ranked:
        if all(chosen_one not in walk.seen(n) for n in meets[axis] for chosen_one in chosen):
            chosen.append(axis)
    return tuple(chosen)


def _may(axis: int, nodes: Sequence[Node], graph: Traced, walk: GraphWalk) -> bool:
    """Whether an axis can be dealt at all: nobody needs it whole, and no value has it twice."""
    if axis in walk.axes.barred or walk.axes.sizes[axis] < 2:
        return False
    for node in nodes:
        for value in (node, *node.all_input_nodes):
            if is_tensor(value) and sum(dim.count(axis) for dim in walk.of(value)) > 1:
                return False
            if value in graph.buffers and _folded(value, axis, walk) and packet(node) == "batch_norm":
                return False
        if axis in walk.axes.known(walk.summed.get(node, ())) and not _adds(node, axis, walk):
            return False
    return True


def _folded(node: Node, axis: int, walk: GraphWalk) -> bool:
    dealt_dim = walk.dealt(node, (axis,))
    return dealt_dim is not None and dealt_dim.outer > 1


def _adds(node: Node, axis: int, walk: GraphWalk) -> bool:
    """Whether a sum over this axis may be taken rank by rank."""
    if packet(node) == "embedding":
        dealt_dim = walk.dealt(arguments(node)["weight"], (axis,))
        plain = not arguments(node).get("scale_grad_by_freq") and not arguments(node).get("sparse")
        return dealt_dim is not None and (dealt_dim.outer, dealt_dim.units.width) == (1, 1) and plain
    return "add" not in packet(node)  # a sum that is added to something is a term on one rank alone


def worth_of(axis: int, nodes: Sequence[Node], graph: Traced, walk: GraphWalk) -> Worth:
    """See `Worth`."""
    saved = sent = 0.0
    # In their order: sums, and with them the choice, are the same on every rank.
    entered: dict[Node, None] = {}
    for node in nodes:
        if packet(node) in PRODUCTS:
            saved += walk.axes.size(walk.seen(node)) / BATCH / 2
        if axis in walk.axes.known(walk.summed.get(node, ())):
            sent += walk.axes.size(a for dim in walk.of(node) for a in dim) / BATCH
        for n in node.all_input_nodes:
            if is_tensor(n) and n.op == "call_function" and not walk.dealt(n, (axis,)):
                entered[n] = None
    sent += sum(walk.axes.size(a for dim in walk.of(n) for a in dim) for n in entered) / BATCH
    dealt = (p for p in graph.parameters if walk.dealt(p, (axis,)))
    held = sum(walk.axes.size(a for dim in walk.of(p) for a in dim) for p in dealt)
    products = sum(packet(n) in PRODUCTS for n in nodes)
    return Worth(saved, sent, held // 2, products)


def notes_of(graph: Traced, walk: GraphWalk, chosen: Sequence[int]) -> list[str]:
    """What is dealt, a line an axis: `heads 4 of 8: layers.0.qkv.weight rows, layers.0.proj.weight columns`."""
    lines = []
    for axis in chosen:
        held = [(name, walk.dealt(p, (axis,))) for p, name in graph.parameters.items()]
        parts = [f"{name} (dim {dealt.dim})" for name, dealt in held if dealt]
        widths = {dealt.units.width for _, dealt in held if dealt}
        units = f"{walk.axes.sizes[axis]} of {max(widths)}" if max(widths) > 1 else str(walk.axes.sizes[axis])
        lines.append(f"{units}: {', '.join(parts)}")
    return lines


def whole_of(graph: Traced, walk: GraphWalk, chosen: Sequence[int]) -> list[tuple[str, str]]:
    """(matrix that stays whole, why), in the graph's order."""
    lines = []
    for parameter, name in graph.parameters.items():
        dims = walk.of(parameter)
        if len(dims) > 1 and not walk.dealt(parameter, chosen):
            why = next(
                (
                    walk.axes.barred[a]
                    for a in (axis for dim in dims for axis in dim)
                    if a in walk.axes.barred
                ),
                "",
            )
            lines.append((name, why))
    return lines
