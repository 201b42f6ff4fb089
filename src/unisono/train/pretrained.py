"""The weights that a run begins from, where its recipe names some instead of drawing them.

A rank knows by its slots which box of which tensor it holds, and reads those boxes: nobody ever has a whole model, or a
whole layer that others share.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unisono.config import ModelConfig
from unisono.models.hf.names import Layout
from unisono.models.lora import adapters_of, plain
from unisono.models.weights import Weights, matched, own_names, read_box, same
from unisono.parallel.offload.lending import at_home
from unisono.parallel.params import Slot
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
    return Beginning(weights, layout_of(config, model, weights), drawn)


def layout_of(config: ModelConfig, model: nn.Module, weights: Weights) -> Layout:
    """How weights lie that are those of `model` without its adapters. Raises UsageError W02 to W04."""
    new, ties = adapters_of(model), dict(model.anatomy.ties)  # type: ignore[union-attr,arg-type]
    shapes = {
        plain(name): tuple(p.shape)
        for name, p in model.named_parameters()
        if name not in new and name not in ties
    }
    layouts = [own_names(shapes), own_names(shapes, "stem.module."), *config.layouts(shapes).values()]
    if original := getattr(model, "original", None):  # a module of the user's that was cut along its graph
        layouts.append({name: (same(shape, original.get(name, name)),) for name, shape in shapes.items()})
    aliases = ["lm_head.weight", "output_layer.weight", *ties]
    if (names := getattr(model, "names", None)) is not None:
        layouts += [names.files, names.modules]
        aliases += names.their_ties
    return matched(layouts, weights, aliases if ties else ())
