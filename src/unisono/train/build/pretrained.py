"""The weights that a run begins from, where its recipe names some instead of drawing them.

A rank knows by its slots which box of which tensor it holds, and reads those boxes: nobody ever has a whole model, or a
whole layer that others share.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unisono.config import ModelConfig
from unisono.models.cut_chain import FoldedWeights, GraphUnit
from unisono.models.hf.names import Layout
from unisono.models.lora import adapters_of, plain
from unisono.models.weights import Weights, matched, own_names, read_box, same
from unisono.parallel.offload.param_streaming import at_home
from unisono.parallel.params import Slot
from unisono.spec.model import OwnModel
from unisono.train.foreign import open_weights


@dataclass(frozen=True, slots=True)
class Beginning:
    """Weights, and how they lie. drawn(name): the full initial tensor of what they lack, which is adapters."""

    weights: Weights
    layout: Layout
    drawn: Callable[[str], Tensor]

    @torch.no_grad()
    def fill(self, slots: Sequence[Slot], owners: Mapping[str, str]) -> None:
        """Give each slot its box, in its own dtype."""
        for slot in slots:
            name, out = owners.get(slot.name, slot.name), at_home(slot.master)
            if (parts := self.layout.get(plain(name))) is not None:
                read_box(parts, self.weights, slot.start, out)
                continue
            full = self.drawn(name)
            for dim, (first, size) in enumerate(zip(slot.start, out.shape, strict=True)):
                full = full.narrow(dim, first, size)
            out.copy_(full)


def beginning(config: ModelConfig, model: nn.Module, drawn: Callable[[str], Tensor]) -> Beginning | None:
    """What the recipe's `[model]` says of the first weights of `model`; None where all are drawn.

    Raises UsageError: W01 to W05, where they cannot be read or do not fit.
    """
    path = config.begins_from()
    if path is None:
        return None
    weights = open_weights(path)
    layout = layout_of(config, model, weights)
    if isinstance(config, OwnModel):
        _fill_buffers(model, weights, layout)
    return Beginning(folded_as(model, layout, weights), layout, drawn)


def folded_as(model: nn.Module, layout: Layout, weights: Weights) -> Weights:
    """Weights, or what an optimiser keeps like them, in the order of rows in which a cut module holds them."""
    held = getattr(model, "cut_names", {})
    folds = {  # of tensors that came by the names of the user's module, not by ours
        parts[0].name: held[name].folded
        for name, parts in layout.items()
        if name in held and held[name].folded and not parts[0].name.endswith(name)
        if weights.shapes.get(parts[0].name)  # a counter of steps has no rows
    }
    return FoldedWeights(weights, folds) if folds else weights


def prefix_of(model: nn.Module, layout: Layout) -> str:
    """What all names there begin with, before the names of the user's module."""
    ours = next(iter(layout))
    theirs = layout[ours][0].name
    held = getattr(model, "cut_names", {})
    said = [ours, held[ours].name if ours in held else ours, ours.removeprefix("stem.module.")]
    return next((theirs.removesuffix(name) for name in said if theirs.endswith(name)), "")


@torch.no_grad()
def _fill_buffers(model: nn.Module, weights: Weights, layout: Layout) -> None:
    """Give the buffers of a user's own module, such as running statistics, the values that they have there."""
    prefix = prefix_of(model, layout)
    units = [block for block in model.blocks if isinstance(block, GraphUnit)]  # type: ignore[union-attr]
    for values in [unit.held for unit in units] or [_buffers(model)]:
        for name, value in values.items():
            if weights.shapes.get(prefix + name) == tuple(value.shape):
                read = weights.box(prefix + name, (0,) * value.dim(), tuple(value.shape))
                values[name] = read.to(value.dtype).clone() if units else value.copy_(read)


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that have values by now, by the names of the user's module."""
    return {n.removeprefix("stem.module."): b for n, b in model.named_buffers() if not b.is_meta}


def layout_of(config: ModelConfig, model: nn.Module, weights: Weights) -> Layout:
    """How weights lie that are those of `model` without its adapters. Raises UsageError W02 to W04."""
    new, ties = adapters_of(model), dict(model.anatomy.ties)  # type: ignore[union-attr,arg-type]
    shapes = {
        plain(name): tuple(p.shape)
        for name, p in model.named_parameters()
        if name not in new and name not in ties
    }
    layouts = [own_names(shapes), own_names(shapes, "stem.module."), *config.layouts(shapes).values()]
    beside: list[str] = []  # what a state of the user's module has that is no parameter here
    if held := getattr(model, "cut_names", None):  # it was cut along its graph
        beside = [*model.beside, *(place.name for place in held.values())]  # type: ignore[misc,union-attr]
        layouts.append({name: (same(shape, held[name].name),) for name, shape in shapes.items()})
    beside += _buffers(model) if isinstance(config, OwnModel) else ()
    aliases = ["lm_head.weight", "output_layer.weight", *ties]
    if (names := getattr(model, "names", None)) is not None:
        layouts += [names.files, names.modules]
        aliases += names.their_ties
    return matched(layouts, weights, [*beside, *(aliases if ties else ())])
