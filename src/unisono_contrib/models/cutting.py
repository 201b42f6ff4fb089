"""A user's module without stem, blocks and head as a chain along its graph; whole, and why, where it has none."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from unisono.models.chain import Chain
from unisono.models.cut_chain import InferredChain, OwnName, folded, line_of
from unisono.models.plain import UserModel, forward_of, kept_whole, one_input
from unisono.spec.frames import words
from unisono.spec.layout import Anatomy, Split
from unisono_contrib.models.deals import GraphWalk, chosen_axes, notes_of, walked, whole_of
from unisono_contrib.models.traced import Traced, Untraceable, random_of, traced
from unisono_contrib.models.unit import NoSamples, unit_of
from unisono_contrib.models.units import Stretch, additions, free_nodes, multiplied, stretches, uses


def cut_model(model: UserModel, sample: Tensor) -> Chain:
    """A user's whole module as a chain along its graph; as it is, with the reason, where it has none. sample: an input
    of one sample, [1, ...]."""
    module = one_input(model.stem.module)  # type: ignore[arg-type]
    own_loss = getattr(module, "loss", None)
    try:
        chain = inferred(module, sample, model.loss, plain=own_loss is None)
        if own_loss is None and chain.scores and isinstance(chain.scores[0], tuple):
            raise Untraceable("its forward returns several tensors, and it has no loss", forward_of(module))
        if own_loss is not None and (why := looks_at(own_loss, module, chain.scores, sample)):
            raise Untraceable(why, forward_of(module))
    except Untraceable as error:
        where = f" ({error.where})" if error.where else ""
        return kept_whole(UserModel(module), f"its graph cannot be cut: {error.why}{where}")
    # The chain has their values; a loss of the module's keeps the module.
    for parameter in module.parameters():
        parameter.data = parameter.data.new_empty(0)
    return chain


class _Looking(TorchFunctionMode):
    """Sees whether one of these tensors is read."""

    def __init__(self, held: Sequence[Tensor]) -> None:
        super().__init__()
        self._held, self.seen = {id(t) for t in held}, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= any(id(x) in self._held for x in tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))


def looks_at(
    loss: Callable[[Any, Tensor], Tensor], module: nn.Module, scores: Sequence[tuple[int, ...]] | tuple[int, ...],
    sample: Tensor,
) -> str:  # fmt: skip
    """Why a loss of the module's own keeps it whole: it reads the module's tensors, or it cannot be tried; "" where
    neither. scores: shape of each output for one sample; one shape where there is one output."""
    tokens = not sample.is_floating_point()
    targets = torch.zeros((2, *sample.shape[1:]) if tokens else (2,), dtype=torch.int64)
    several = bool(scores) and isinstance(scores[0], tuple)
    outputs = [torch.ones(2, *shape) for shape in (scores if several else [scores])]  # type: ignore[misc]
    looking = _Looking([*module.parameters(), *module.buffers()])
    try:
        with torch.no_grad(), looking:
            loss(tuple(outputs) if several else outputs[0], targets)
    except Exception as error:
        return f"its loss could not be tried on zeros: {words(error, 120)}"
    return "its loss reads weights of the model" if looking.seen else ""


@dataclass(frozen=True, slots=True)
class _Cut:
    """A graph and where it is cut."""

    graph: Traced
    walk: GraphWalk
    chosen: Sequence[int]
    parts: Sequence[Stretch]
    free: set[Node]


def inferred(
    module: nn.Module, sample: Tensor, loss: Callable[[Any, Tensor], Tensor], *, plain: bool
) -> InferredChain:
    """The chain of a module. sample: an input of one sample, [1, ...]. plain: the loss is the summed cross-entropy.
    Raises Untraceable."""
    graph = traced(module, sample)
    random = random_of(graph.graph)
    if random:
        raise Untraceable(f"it draws random numbers: {random[0]}", random[0].rpartition("(")[2].rstrip(")"))
    walk = walked(graph)
    chosen = chosen_axes(graph, walk)
    cut = _Cut(graph, walk, chosen, stretches(graph, walk, chosen), free_nodes(graph))
    values = dict(module.named_parameters()) | dict(module.named_buffers())
    held = {p: _held(values[name], p, cut) for p, name in graph.parameters.items()}
    try:
        units = [unit_of(graph, walk, chosen, part, cut.free, values, held) for part in cut.parts]
    except NoSamples as error:
        raise Untraceable("a dropout of a tensor that has no samples", line_of(error.node)) from None
    for unit, part in zip(units, cut.parts, strict=True):
        unit.met, unit.additions = multiplied(part, walk), additions(part, walk)
    names = _names(cut)
    anatomy = Anatomy(
        splits={"blocks.*": Split.GRAPH} if chosen else {},
        divides={str(axis): walk.axes.sizes[axis] for axis in chosen},
        ties=_ties(names),
        cross_entropy=plain,
        terms=_terms(graph, sample),
        whole="" if chosen else "; ".join(["nothing in its graph can be split", *_wholes(cut)[:3]]),
    )
    names_there = {name: OwnName(theirs, _folds(node, cut)) for name, (node, theirs) in names.items()}
    names_there |= {
        f"blocks.{i}.{name}": OwnName(name) for i, unit in enumerate(units) for name in unit.written
    }
    known = {theirs for theirs, _ in names_there.values()}
    beside = [name for name in module.state_dict() if name not in known]
    says = [f"cut along its graph into {len(units)} units", *notes_of(graph, walk, chosen), *_wholes(cut)]
    shapes = tuple(tuple(n.meta["val"].shape[1:]) for n in graph.outputs)
    return InferredChain(
        units, anatomy, loss, names_there, beside, says, shapes if graph.several else shapes[0]
    )


def _names(cut: _Cut) -> dict[str, tuple[Node, str]]:
    """Name here → (placeholder, name in the user's module), of every use of a parameter in a unit."""
    return {
        f"blocks.{i}.{cut.graph.parameters[p]}": (p, cut.graph.parameters[p])
        for i, part in enumerate(cut.parts)
        for p in uses(part, cut.graph, cut.free)
    }


def _ties(names: Mapping[str, tuple[Node, str]]) -> tuple[tuple[str, str], ...]:
    """(name of a later use, name of the first one)."""
    first: dict[Node, str] = {}
    ties = []
    for name, (node, _) in names.items():
        if node in first:
            ties.append((name, first[node]))
        first.setdefault(node, name)
    return tuple(ties)


def _held(value: Tensor, node: Node, cut: _Cut) -> nn.Parameter:
    """The user's parameter in the order in which it is held."""
    folds = _folds(node, cut)
    return nn.Parameter(folded(value.detach(), *folds) if folds else value.detach(), value.requires_grad)


def _folds(node: Node, cut: _Cut) -> tuple[int, ...]:
    """See `OwnName`."""
    dealt = cut.walk.dealt(node, cut.chosen)
    return () if dealt is None or dealt.outer == 1 else (dealt.dim, dealt.outer, dealt.units.width)


def _terms(graph: Traced, sample: Tensor) -> int:
    """Count the places of a sample over which a weight's gradient is added up: places of the input or of the output."""
    out = max(n.meta["val"][0].numel() // n.meta["val"].shape[-1] for n in graph.outputs)
    inner = sample[0].numel() // (sample.shape[1] if sample.dim() > 2 else 1)
    return max(int(out), int(inner), 1)


def _wholes(cut: _Cut) -> list[str]:
    """What stays whole, and why, in lines."""
    return [
        f"whole: {name}{f', by {why}' if why else ''}"
        for name, why in whole_of(cut.graph, cut.walk, cut.chosen)
    ]
