"""`tp` of a unit of a traced graph: the graph is rewritten, operator by operator, for what lies on this rank.

A value is whole, the same on all ranks, or dealt along one of its dims. What is whole enters a dealt operator through
`enter`, which adds up its gradients; an operator that adds up over what is dealt makes terms of a sum, which `leave`
adds up (Shoeybi et al., 2019). Sizes in the graph that count what is dealt become this rank's. Between units all is
whole.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

from unisono.comm.group import Group
from unisono.models.batch_norm import LeafNorm
from unisono.models.cut_chain import GraphUnit, unfolded
from unisono.parallel.cut import Stage
from unisono.parallel.parts import Cut, ends_of, features_of, part_of
from unisono.parallel.pass_context import PassContext, Stages
from unisono.parallel.tensor import Crossing, GatherVocab, enter, gather_dealt, leave, vocab_loss
from unisono.spec.errors import UsageError
from unisono.spec.layout import Places
from unisono_contrib.models.axes import arguments, packet
from unisono_contrib.models.deals import DealtDim
from unisono_contrib.models.traced import BATCH
from unisono_contrib.models.unit import Drop, no_view

_SHAPED = frozenset(("view", "reshape", "_unsafe_view", "expand"))
_CONVOLUTIONS = [f"conv{turned}{n}d" for turned in ("", "_transpose") for n in (1, 2, 3)]
_PRODUCTS = frozenset(("linear", *_CONVOLUTIONS))


# What a rewritten graph calls ---------------------------------------------------------------------------------


def summed_mean(x: Tensor, share: float, group: Group) -> Tensor:
    """A mean over this rank's `share` of the places, as the mean over all of them."""
    return leave(x * share, group, 0)


def with_bias(x: Tensor, bias: Tensor, dims: int) -> Tensor:
    """Features plus a bias, with `dims` dims behind the features."""
    return x + bias.view(-1, *(1,) * dims)


def looked_up(weight: Tensor, indices: Tensor, padding: int, start: int, group: Group) -> Tensor:
    """Rows of a table of which this rank has those from `start` on."""
    local = indices - start
    foreign = (local < 0) | (local >= weight.shape[0])
    padding_here = padding - start if start <= padding < start + len(weight) else None
    rows = F.embedding(local.masked_fill(foreign, 0), weight, padding_here)
    return leave(rows.masked_fill(foreign.unsqueeze(-1), 0.0), group, 0)


def part_here(x: Tensor, dealt: DealtDim, group: Group) -> Tensor:
    """This rank's part of a whole value."""
    start, size = features_of(dealt.units, group)
    if dealt.outer == 1:
        return x.narrow(dealt.dim, start, size)
    full = dealt.units.count * dealt.units.width  # pieces of it: one of them may be the samples
    apart = x.unflatten(dealt.dim, (-1, full)).narrow(dealt.dim + 1, start, size)
    return apart.flatten(dealt.dim, dealt.dim + 1)


class Applied(nn.Module):
    """A function with what it is told on this rank, as a step of a graph."""

    def __init__(self, function: Callable[..., Tensor], *more: Any) -> None:
        super().__init__()
        self.function, self.more = function, more

    def forward(self, *args: Any) -> Tensor:
        return self.function(*args, *self.more)


def gathered(x: Tensor, dealt: DealtDim, group: Group) -> Tensor:
    """The parts of all ranks along one dim; each keeps its own part of the gradient, since all go on alike."""
    ends = [dealt.units.before(end) for end in ends_of(dealt.units.count, group.size)]
    length = ends[group.index + 1] - ends[group.index]

    def gather(x: Tensor, group: Group) -> Tensor:
        apart = x.unflatten(dealt.dim, (-1, length)).movedim(dealt.dim + 1, 0).contiguous()
        whole = gather_dealt(apart, group, ends).movedim(0, dealt.dim + 1)
        return whole.flatten(dealt.dim, dealt.dim + 1)

    def back(grad: Tensor, group: Group) -> Tensor:
        return part_here(grad, dealt, group).contiguous()

    return Crossing.apply(x, group, gather, back, x.dtype)  # type: ignore[return-value]


# The rewriting -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Rewriting:
    """One unit on its way. cuts: what this rank has of a parameter, by its name in the unit. entered: values that went
    through `enter`."""

    unit: GraphUnit
    group: Group
    cuts: dict[str, Cut] = field(default_factory=dict)
    entered: dict[Node, Node] = field(default_factory=dict)

    def dealt(self, node: Any) -> DealtDim | None:
        """What is dealt of a value here: nothing where there are fewer units than ranks."""
        dim = node.meta.get("dealt") if isinstance(node, Node) else None
        return dim if dim is not None and dim.units.count >= self.group.size else None

    def step(self, function: Callable[..., Tensor], args: tuple[Any, ...], *more: Any) -> Node:
        """A call of `function(*args, *more)`, put where the graph is open."""
        name = f"step_{sum(key.startswith('step_') for key in self.unit._modules)}"
        self.unit.add_submodule(name, Applied(function, *more))
        return self.unit.graph.call_module(name, args)

    def local(self, dealt: DealtDim) -> int:
        """Units of this rank."""
        return part_of(dealt.units.count, self.group)[1]

    def scaled(self, size: Any, dealt: DealtDim) -> Any:
        """A number that counts what is dealt, as it is here."""
        if isinstance(size, Node):
            times = self.unit.graph.call_function(operator.mul, (size, self.local(dealt)))
            return self.unit.graph.call_function(operator.floordiv, (times, dealt.units.count))
        return size * self.local(dealt) // dealt.units.count if 0 < size < 2**62 else size


def deal_unit(unit: GraphUnit, group: Group) -> dict[str, Cut]:
    """Give a unit this rank's part of what its graph says is dealt; returns parameter name → Cut."""
    r = _Rewriting(unit, group)
    for node in list(unit.graph.nodes):
        with unit.graph.inserting_before(node):
            if node.op == "get_attr":
                _hold(node, r)
            elif node.op in ("call_function", "call_module"):
                _operate(node, r)
            elif node.op == "output":
                _hand_on(node, r)
    unit.graph.eliminate_dead_code(_kept)
    unit.recompile()
    return r.cuts


def _kept(node: Node) -> bool:
    return node.op in ("placeholder", "output")


def _hold(node: Node, r: _Rewriting) -> None:
    """A parameter becomes this rank's part; a buffer keeps all, of which the graph sees a part."""
    dealt = r.dealt(node)
    if dealt is None:
        return
    name = str(node.target)
    path, _, leaf = name.rpartition(".")
    module = r.unit.get_submodule(path)
    if leaf not in module._parameters:
        with r.unit.graph.inserting_after(node):
            here = r.step(part_here, (node,), dealt, r.group)
        node.replace_all_uses_with(here, delete_user_cb=lambda user: user is not here)
        here.meta = {**node.meta}
        return
    units = replace(dealt.units, width=dealt.units.width * dealt.outer)
    start, size = features_of(units, r.group)
    whole = module.get_parameter(leaf)
    part = whole.detach().narrow(dealt.dim, start, size).clone()
    setattr(module, leaf, nn.Parameter(part, whole.requires_grad))
    r.cuts[name] = Cut(dealt.dim, start, size, whole.shape[dealt.dim])


def _operate(node: Node, r: _Rewriting) -> None:
    operands = [n for n in node.all_input_nodes if "dealt" in n.meta]
    out, ins = r.dealt(node), [r.dealt(n) for n in operands]
    if node.target in (unfolded, operator.getitem, no_view) or (out is None and not any(ins)):
        return
    if out is not None and not any(ins):  # made whole, of which a part is used
        _take(node, out, r)
        return
    for operand in operands:
        if r.dealt(operand) is None and operand.meta.get("grad"):
            node.replace_input_with(operand, _entered(operand, r))
    summed = node.meta.get("summed")
    if summed is not None and any(d is not None and d.axis == summed for d in ins):
        _add_up(node, next(d for d in ins if d is not None and d.axis == summed), r)
        return
    _resize(node, out, r)


def _take(node: Node, out: DealtDim, r: _Rewriting) -> None:
    """Of an operator that sees nothing dealt, this rank's part of the result."""
    with r.unit.graph.inserting_after(node):
        whole = r.step(enter, (node,), r.group, 0) if node.meta.get("grad") else node
    with r.unit.graph.inserting_after(whole):
        here = r.step(part_here, (whole,), out, r.group)
    node.replace_all_uses_with(here, delete_user_cb=lambda user: user not in (whole, here))
    here.meta = {**node.meta}
    node.meta = {**node.meta, "dealt": None}


def _entered(operand: Node, r: _Rewriting) -> Node:
    """A whole value as dealt operators see it, once for all of them."""
    if operand not in r.entered:
        with r.unit.graph.inserting_after(operand):
            here = r.step(enter, (operand,), r.group, 0)
        here.meta = {"dealt": None, "grad": False, "shape": operand.meta.get("shape")}
        r.entered[operand] = here
    return r.entered[operand]


def _add_up(node: Node, dealt: DealtDim, r: _Rewriting) -> None:
    """An operator that adds up over what is dealt."""
    graph, name, options = r.unit.graph, packet(node), arguments(node)
    if name == "embedding":
        start = features_of(dealt.units, r.group)[0]
        with graph.inserting_after(node):
            args = (options["weight"], options["indices"], options.get("padding_idx", -1))
            step = r.step(looked_up, args, start, r.group)
        step.meta = {**node.meta}
        node.replace_all_uses_with(step)
        return
    bias = options.get("bias") if name in _PRODUCTS else None
    if bias is not None:
        bias = next((n for n, e in r.entered.items() if e is bias), bias)  # it is added once, behind the sum
        args = list(node.args)
        args[2] = None
        node.args = tuple(args)
    with graph.inserting_after(node):
        if name == "mean":
            share = r.local(dealt) / dealt.units.count
            step = r.step(summed_mean, (node,), share, r.group)
        else:
            step = r.step(leave, (node,), r.group, 0)
    last = step
    if bias is not None:
        with graph.inserting_after(step):
            behind = 0 if name == "linear" else len(node.meta["shape"]) - 2
            last = graph.call_function(with_bias, (step, bias, behind))
    node.replace_all_uses_with(last, delete_user_cb=lambda user: user not in (step, last))
    last.meta = {**node.meta}
    _resize(node, None, r)


def _resize(node: Node, out: DealtDim | None, r: _Rewriting) -> None:
    """Sizes among the arguments that count what is dealt."""
    if node.op == "call_module":
        module = r.unit.get_submodule(str(node.target))
        if isinstance(module, LeafNorm) and out is not None:
            module.part = features_of(out.units, r.group)
        _place_mask(module, node, r)
        return
    name = packet(node)
    change = _CHANGES.get(name)
    if name in _SHAPED and out is not None:
        at = list(node.args)
        sizes = list(at[1])  # type: ignore[arg-type]
        sizes[out.dim] = r.scaled(sizes[out.dim], out)
        node.args = (at[0], sizes, *at[2:])
    elif change is not None:
        change(node, out, r)


def _unflattened(node: Node, out: DealtDim | None, r: _Rewriting) -> None:
    x, dim, sizes = node.args[:3]
    if out is not None and isinstance(dim, int):
        first, many = dim % len(x.meta["shape"]), list(sizes)  # type: ignore[union-attr,arg-type]
        if first <= out.dim < first + len(many):
            many[out.dim - first] = r.scaled(many[out.dim - first], out)
            node.args = (x, dim, many)


def _sliced(node: Node, out: DealtDim | None, r: _Rewriting) -> None:
    """Where pieces begin and end."""
    options = arguments(node)
    dealt, dim = r.dealt(node.args[0]), options.get("dim", 0)
    if dealt is None or dim % len(node.args[0].meta["shape"]) != dealt.dim:  # type: ignore[union-attr]
        return
    for key in ("start", "end", "length", "split_size", "split_sizes"):
        if (value := options.get(key)) is not None:
            several = isinstance(value, (list, tuple))
            options[key] = [r.scaled(v, dealt) for v in value] if several else r.scaled(value, dealt)
    _set_arguments(node, options)


def _set_arguments(node: Node, options: Mapping[str, Any]) -> None:
    """Let a call have these arguments, by the names of its operator's schema."""
    schema = node.target._schema  # type: ignore[union-attr]
    node.args, node.kwargs = tuple(options[argument.name] for argument in schema.arguments), {}


def _grouped(node: Node, out: DealtDim | None, r: _Rewriting) -> None:
    """Groups of a norm, or of a convolution whose channels are groups."""
    options = arguments(node)
    key = "num_groups" if "num_groups" in options else "groups"
    if out is not None and options.get(key, 1) > 1:
        _set_arguments(node, {**options, key: r.scaled(options[key], out)})


def _place_mask(module: nn.Module, node: Node, r: _Rewriting) -> None:
    """Tell a dropout which places of its input lie here."""
    dealt = r.dealt(node.args[0])
    if not isinstance(module, Drop) or dealt is None:
        return
    start, size = features_of(dealt.units, r.group)
    full = dealt.units.count * dealt.units.width
    at, before = module.batch
    outer = dealt.outer // (before * BATCH) if dealt.dim == at else dealt.outer
    stretches = tuple((piece * full + start, size) for piece in range(outer))
    module.mask.places[module.arranged(dealt.dim)] = Places(outer * full, stretches)


_CHANGES: dict[str, Callable[[Node, DealtDim | None, _Rewriting], None]] = {
    "unflatten": _unflattened,
    **dict.fromkeys(("slice", "narrow", "split", "split_with_sizes"), _sliced),
    **dict.fromkeys(("group_norm", "conv1d", "conv2d", "conv3d"), _grouped),
}


def _hand_on(node: Node, r: _Rewriting) -> None:
    """What a unit hands on is whole, but for scores, whose classes the loss may take as they are."""
    outputs = node.args[0]
    several = isinstance(outputs, (list, tuple))
    values = []
    for value in outputs if several else [outputs]:  # type: ignore[union-attr]
        dealt = r.dealt(value)
        if dealt is not None and (several or not _classes(value, dealt)):
            value = r.step(gathered, (value,), dealt, r.group)
        values.append(value)
    node.args = (tuple(values) if several else values[0],)
    r.unit.classes = r.dealt(values[0]) if not several and "dealt" in values[0].meta else None  # type: ignore[assignment]


def _classes(value: Any, dealt: DealtDim) -> bool:
    last = dealt.dim == len(value.meta["shape"]) - 1
    return last and (dealt.outer, dealt.units.width) == (1, 1)


# The pass ----------------------------------------------------------------------------------------------------


def split_graphs(stages: Stages, context: PassContext) -> None:
    """Deal the units of this rank's stages over `tp`. A loss of the user's is given all scores, the summed
    cross-entropy those of this rank. Raises UsageError P12 where nothing can be dealt."""
    if context.plan.chunks > 1:
        what = (
            f"tp={context.plan.tp}: a model that is split along its graph has no positions to send in chunks"
        )
        raise UsageError(what, where="plan.tp, model.kind", fix=f"tp={context.mesh.tp.size}", code="P16")
    most = max(context.anatomy.divides.values(), default=0)
    if most < context.mesh.tp.size:
        what = f"tp={context.mesh.tp.size} finds nothing to split: {most} is the largest count in this model"
        raise UsageError(what, where="plan.tp, model.kind", fix=f"tp={max(1, most)}", code="P12")
    for stage in stages.values():
        for i, unit in stage.blocks.items():
            if not isinstance(unit, GraphUnit):
                continue
            cuts = deal_unit(unit, context.mesh.tp)
            context.cuts.update({f"blocks.{i}.{name}": cut for name, cut in cuts.items()})
            classes = getattr(unit, "classes", None)
            if classes is not None and stage.last:
                _score(stage, classes, context)


def _score(stage: Stage, dealt: DealtDim, context: PassContext) -> None:
    """The loss over scores whose classes are dealt."""
    tp, own_loss = context.mesh.tp, stage.loss
    ends = ends_of(dealt.units.count, tp.size)
    stage.whole = lambda y: GatherVocab.apply(y, ends, tp)
    if context.anatomy.cross_entropy:
        stage.loss = partial(_by_row, vocab_loss(tp, ends[tp.index]))
    else:
        stage.loss = lambda y, targets: own_loss(GatherVocab.apply(y, ends, tp), targets)


def _by_row(loss: Callable[[Tensor, Tensor], Tensor], y: Tensor, targets: Tensor) -> Tensor:
    """Scores of any shape [..., v], and their targets [...], a row each."""
    return loss(y.flatten(0, -2).unsqueeze(1), targets.flatten().unsqueeze(1))
