"""A unit of a traced graph as a module that runs it: parameters under the names that they have in the user's module.

Its forward is Python that `torch.fx` writes. Where the graph asks for a dtype or a device, the unit asks the tensors at
hand. Dropouts are ours, so that masks are functions of seed, sample, place and element.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from unisono.models.batch_norm import LeafNorm
from unisono.models.cut_chain import GraphUnit, unfolded
from unisono.models.noise import Dropout, Noise
from unisono_contrib.models.axes import arguments, is_tensor, packet
from unisono_contrib.models.deals import GraphWalk, sizes
from unisono_contrib.models.traced import BATCH, Either, Traced
from unisono_contrib.models.units import Stretch, uses

_DROPS = ("dropout", "feature_dropout", "scaled_dot_product_attention")


# What a unit calls beside torch's operators -------------------------------------------------------------------


def by_dtype(like: Tensor | None, single: Any, double: Any) -> Any:
    """What a traced argument is in the dtype of `like`; a dtype itself is that one."""
    dtype = torch.float32 if like is None else like.dtype
    if isinstance(single, torch.dtype):
        return dtype
    return double if dtype is torch.float64 else single


def no_view(x: Tensor) -> Tensor:
    """A value that is no view of another one: FSDP2 hooks what a module returns, and a view may be written to behind
    it."""
    return x.clone() if x._is_view() else x


class Drop(nn.Module):
    """A dropout of the graph. batch: where the samples lie: (dim, places before them in it), (0, 1) as a rule. kind: of
    elements, of whole channels, or of an attention's weights."""

    def __init__(self, p: float, batch: tuple[int, int], kind: str) -> None:
        super().__init__()
        self.mask, self.batch, self.kind = Dropout(p), batch, kind

    def forward(self, x: Tensor, noise: Noise | None) -> Tensor:
        """x with some elements zero; as it is without noise."""
        if noise is None or self.mask.p == 0.0:
            return x
        if self.kind == "feature_dropout":
            return x * self._dropped(torch.ones_like(x.flatten(2)[..., :1]), noise).view(
                *x.shape[:2], *(1,) * (x.dim() - 2)
            )
        return self._dropped(x, noise)

    def _dropped(self, x: Tensor, noise: Noise) -> Tensor:
        dim, before = self.batch
        if (dim, before) == (0, 1) and len(noise.samples) == x.shape[0]:
            return self.mask(x, noise)
        apart = x.unflatten(dim, (before, len(noise.samples), -1)).movedim(dim + 1, 0)
        return self.mask(apart, noise).movedim(0, dim + 1).flatten(dim, dim + 2)

    def arranged(self, dim: int) -> int:
        """Where a dim of x is when the samples come first, for what is dealt of it."""
        at, before = self.batch
        if (at, before) == (0, 1):
            return dim
        return dim + 1 if dim < at else at + 2 if dim == at else dim + 2


class DroppedAttention(Drop):
    """Attention whose weights are dropped, so they are written out."""

    def forward(  # type: ignore[override]
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float | None,
        noise: Noise | None,
    ) -> Tensor:
        if noise is None or self.mask.p == 0.0:
            return nn.functional.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale)
        weights = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if causal:
            seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
            weights = weights.masked_fill(~seen, float("-inf"))
        if mask is not None:
            weights = (
                weights.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else weights + mask
            )
        return self._dropped(weights.softmax(-1), noise) @ v


# Building ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Building:
    """One unit on its way. env: node of the whole graph → node here. layouts: parameters whose units are gathered."""

    graph: Traced
    walk: GraphWalk
    chosen: Sequence[int]
    stretch: Stretch
    free: set[Node]
    root: nn.Module
    values: Mapping[str, Tensor]
    parameters: Mapping[Node, nn.Parameter]
    to: Graph = field(default_factory=Graph)
    env: dict[Node, Node] = field(default_factory=dict)
    held: dict[str, Tensor] = field(default_factory=dict)
    drops: int = 0
    likes: list[Node] = field(default_factory=list)  # a floating tensor to ask for its dtype
    first: Node | None = None  # a tensor that was handed in
    noise: Node | None = None


def unit_of(
    graph: Traced,
    walk: GraphWalk,
    chosen: Sequence[int],
    stretch: Stretch,
    free: set[Node],
    values: Mapping[str, Tensor],
    parameters: Mapping[Node, nn.Parameter],
) -> GraphUnit:
    """The module of a stretch. values: buffers of the user's module, by name. parameters: as they are held here."""
    b = _Building(graph, walk, chosen, stretch, free, nn.Module(), values, parameters)
    x = b.to.placeholder("x")
    b.noise = b.to.placeholder("noise", default_value=None)
    for i, node in enumerate(stretch.entries):
        here = x if len(stretch.entries) == 1 else b.to.call_function(operator.getitem, (x, i))
        b.env[node] = _marked(here, node, b)
    b.first = b.env[stretch.entries[0]]
    b.likes = [_value(p, b) for p in uses(stretch, graph, free)]
    b.likes += [b.env[n] for n in stretch.entries if n.meta["val"].is_floating_point()]
    for node in stretch.nodes:
        # Batches are counted after the step.
        if not (packet(node) == "add_" and node.args[0] in graph.buffers):
            _copied(node, b)
    outputs = [_handed_on(n, b) for n in stretch.exits]
    single = len(outputs) == 1 and not (stretch.exits is graph.outputs and graph.several)
    b.to.output(outputs[0] if single else tuple(outputs))
    _unused(b)
    unit = GraphUnit(b.root, b.to)
    unit.held, unit.written = b.held, ()
    for norm in (m for m in unit.children() if isinstance(m, LeafNorm)):
        counter = norm.names[2]
        if counter:
            module, leaf = _module_for(unit, counter)
            module.register_buffer(leaf, values[counter].detach())
            unit.held[counter] = values[counter].detach()
        unit.written += tuple(filter(None, norm.names))
    return unit


def _handed_on(node: Node, b: _Building) -> Node:
    return _marked(b.to.call_function(no_view, (_value(node, b),)), node, b)


def _unused(b: _Building) -> None:
    """Sizes that were asked for and are not needed."""
    for node in reversed(list(b.to.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            b.to.erase_node(node)


def _marked(here: Node, node: Node, b: _Building) -> Node:
    """With what `tp` has to know of a value: `dealt`, and whether gradients go through it."""
    here.meta["dealt"] = b.walk.dealt(node, b.chosen) if is_tensor(node) else None
    value = node.meta.get("val")
    floats = isinstance(value, Tensor) and value.is_floating_point()
    fixed = node in b.free or node in b.graph.buffers or node in b.graph.constants
    here.meta["grad"] = floats and not fixed
    summed = [a for a in b.walk.axes.known(b.walk.summed.get(node, ())) if a in b.chosen]
    here.meta["summed"] = summed[0] if summed else None
    if isinstance(value, Tensor):
        here.meta["shape"] = sizes(value)
    here.meta["stack_trace"] = node.meta.get("stack_trace")
    return here


def _value(node: Node, b: _Building) -> Node:
    """A node of the whole graph here; what is free is made again."""
    if node in b.env:
        return b.env[node]
    if node in b.graph.parameters:
        return _parameter(node, b)
    if node in b.graph.buffers or node in b.graph.constants:
        return _buffer(node, b)
    if packet(node) == "sym_size":
        b.env[node] = _batch_size(node, b)
        return b.env[node]
    if node not in b.free:
        raise RuntimeError(f"{node} does not reach this unit")
    return _copied(node, b)


def _parameter(node: Node, b: _Building) -> Node:
    name = b.graph.parameters[node]
    _put(b.root, name, b.parameters[node])
    here = _marked(b.to.get_attr(name), node, b)
    dealt = b.walk.dealt(node, b.chosen)
    if dealt is not None and dealt.outer > 1:
        raw = here
        here = b.to.call_function(unfolded, (raw, dealt.dim, dealt.outer, dealt.units.width))
        _marked(here, node, b)
    b.env[node] = here
    return here


def _buffer(node: Node, b: _Building) -> Node:
    if node in b.graph.buffers:
        name = b.graph.buffers[node]
        value = b.values[name]
    else:
        name, value = f"constant_{len(b.held)}", b.graph.constants[node]
    module, leaf = _module_for(b.root, name)
    module.register_buffer(leaf, value.detach(), persistent=True)
    b.held[name] = value.detach()
    b.env[node] = _marked(b.to.get_attr(name), node, b)
    return b.env[node]


def _put(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    module, leaf = _module_for(root, name)
    setattr(module, leaf, parameter)


def _module_for(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """(the module that holds the tensor of this name, made where it is not there, its last word)."""
    *path, leaf = name.split(".")
    module = root
    for word in path:
        if not hasattr(module, word):
            module.add_module(word, nn.Module())
        module = getattr(module, word)
    return module, leaf


def _batch_size(node: Node, b: _Building) -> Node:
    """The number of samples, asked of what was handed in."""
    for entry in b.stretch.entries:
        for dim, size in enumerate(entry.meta["val"].shape):
            if isinstance(size, torch.SymInt) and int(size.node.hint) % BATCH == 0:
                size_node = b.to.call_function(torch.ops.aten.sym_size.int, (b.env[entry], dim))
                times = int(size.node.hint) // BATCH
                many = b.to.call_function(operator.floordiv, (size_node, times)) if times > 1 else size_node
                wanted = int(node.meta["val"].node.hint) // BATCH
                return b.to.call_function(operator.mul, (many, wanted)) if wanted > 1 else many
    raise RuntimeError("no carry of this unit says how many samples there are")


def _argument(value: Any, b: _Building) -> Any:
    if isinstance(value, Node):
        return _value(value, b)
    if isinstance(value, Either):
        like = b.likes[0] if b.likes else None
        return b.to.call_function(by_dtype, (like, value.single, value.double))
    if isinstance(value, torch.device):
        return b.to.call_function(getattr, (b.first, "device"))
    if isinstance(value, (list, tuple)):
        return type(value)(_argument(v, b) for v in value)
    if isinstance(value, slice):
        return slice(*(_argument(v, b) for v in (value.start, value.stop, value.step)))
    return value


def _copied(node: Node, b: _Building) -> Node:
    name = packet(node)
    args = _argument(tuple(node.args), b)
    kwargs = {k: _argument(v, b) for k, v in node.kwargs.items() if k != "pin_memory"}
    if name in _DROPS and (drop := _drop(node, args, b)) is not None:
        here = drop
    elif name == "batch_norm" and args[3] is not None:
        here = _normed(node, args, b)
    else:
        here = b.to.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
    b.env[node] = _marked(here, node, b)
    return here


def _normed(node: Node, args: tuple[Any, ...], b: _Building) -> Node:
    """A batch norm that keeps running statistics."""
    mean, var = (b.graph.buffers[source] for source in node.args[3:5])  # type: ignore[index]
    counter = f"{mean.rpartition('.')[0]}.num_batches_tracked".lstrip(".")
    names = (mean, var, counter if counter in b.values else "")
    place = f"norm_{sum(isinstance(m, LeafNorm) for m in b.root.children())}"
    setattr(b.root, place, LeafNorm(names, float(args[6]), float(args[7]), len(b.values[mean])))
    return b.to.call_module(place, (*args[:5], b.noise))


def _drop(node: Node, args: tuple[Any, ...], b: _Building) -> Node | None:
    """What takes a dropout's place, None for attention without one."""
    options, name = arguments(node), packet(node)
    p = float(options["dropout_p"] if name.startswith("scaled") else options["p"])
    if p == 0.0:
        return (
            None if name.startswith("scaled") else b.to.call_function(torch.ops.aten.alias.default, args[:1])
        )
    place = f"drop_{b.drops}"
    b.drops += 1
    source = node.args[0]
    at = batch_place(b.walk, source)
    if at is None:
        raise NoSamples(node)
    if not name.startswith("scaled"):
        setattr(b.root, place, Drop(p, at, name))
        return b.to.call_module(place, (args[0], b.noise))
    setattr(b.root, place, DroppedAttention(p, at, name))
    q, k, v, mask = (_argument(options[key], b) for key in ("query", "key", "value", "attn_mask"))
    return b.to.call_module(place, (q, k, v, mask, options["is_causal"], options.get("scale"), b.noise))


class NoSamples(Exception):
    """A dropout of a tensor that says nothing of samples."""

    def __init__(self, node: Node) -> None:
        super().__init__(str(node))
        self.node = node


def batch_place(walk: GraphWalk, node: Any) -> tuple[int, int] | None:
    """(dim that has the samples, places before them in it)."""
    for at, dim in enumerate(walk.of(node)):
        if walk.batch in dim:
            return at, walk.axes.size(dim[: dim.index(walk.batch)])
    return None
