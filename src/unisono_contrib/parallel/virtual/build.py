"""The pass that puts layers by virtual shards in the place of a model's own."""

from torch import nn

from unisono.parallel.pass_context import PassContext, Stages
from unisono.parallel.tensor import GatherVocab
from unisono.spec.errors import UsageError
from unisono.spec.layout import Anatomy, Places, Split
from unisono_contrib.parallel.virtual.attention import VirtualCore
from unisono_contrib.parallel.virtual.deal import VirtualDeal
from unisono_contrib.parallel.virtual.layers import (
    VirtualColumn,
    VirtualLinear,
    VirtualNorm,
    VirtualPositions,
    VirtualRow,
    VirtualTable,
)
from unisono_contrib.parallel.virtual.loss import virtual_loss

_LAYERS = {
    Split.COLUMN: VirtualColumn,
    Split.VOCAB_OUT: VirtualColumn,
    Split.ROW: VirtualRow,
    Split.VOCAB_IN: VirtualTable,
    Split.POSITIONS: VirtualPositions,
}


def virtualize(stages: Stages, context: PassContext) -> None:
    """Compute this rank's stages by virtual shards. Raises UsageError where the model does not say how."""
    anatomy, mesh = context.anatomy, context.mesh
    head = next((n for n, s in anatomy.splits.items() if s is Split.VOCAB_OUT), None)
    if head is None or not anatomy.cross_entropy or not anatomy.sequence:
        what = "virtual shards need a model that says how tp and cp split it, and a cross-entropy over its classes"
        fix = "sync=canonical, without shards"
        raise UsageError(what, where="plan.sync, model.kind", fix=fix, code="P12")
    deal = VirtualDeal(context.virtual, mesh.tp, mesh.cp)
    classes = context.shapes[f"{head}.weight"][0]
    here = Places.whole(anatomy.sequence).dealt(mesh.cp.index, mesh.cp.size)
    for stage in stages.values():
        for name, module in list(stage.named_modules()):
            layer = _layer(name, module, anatomy, deal, here)
            if layer is None:
                _check_weightless(name, module)
                continue
            parent, _, leaf = name.rpartition(".")
            setattr(stage.get_submodule(parent), leaf, layer)
            cuts = getattr(layer, "cuts", {})
            context.cuts.update(
                {f"{name}.{key}": cut for key, cut in cuts.items() if getattr(layer, key) is not None}
            )
        first = deal.cp.index * anatomy.sequence // deal.cp.size
        stage.dealt = lambda x, first=first: x.narrow(1, first, x.shape[1] // deal.cp.size)
        if stage.last:
            stage.loss = virtual_loss(deal, classes)
            stage.whole = lambda y: GatherVocab.apply(y, deal.ends(classes), deal.tp)


def _layer(
    name: str, module: nn.Module, anatomy: Anatomy, deal: VirtualDeal, here: Places
) -> nn.Module | None:
    """What takes a module's place, None where it stays. here: the positions of this rank."""
    split = anatomy.split_of(name)
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return VirtualNorm(module, deal)
    if split in _LAYERS:
        return _LAYERS[split](module, deal)  # type: ignore[arg-type]
    if type(module) is nn.Linear:
        return VirtualLinear(module, deal)
    if split is Split.CORE:
        return VirtualCore(module.drop, deal, anatomy.divides["heads"])  # type: ignore[arg-type]
    if split is Split.SEQUENCE_DROPOUT:
        module.places[1] = here  # type: ignore[index,union-attr]
    elif split is Split.ROTARY:
        module.places = here  # type: ignore[assignment]
    return None


def _check_weightless(name: str, module: nn.Module) -> None:
    """Raise UsageError P12 for weights of which nobody would add up what the positions of each rank contribute."""
    weight = next((key for key, p in module.named_parameters(recurse=False) if p.requires_grad), None)
    if weight is not None:
        what = f"virtual shards do not know how to compute {type(module).__name__}, whose weight is {name}.{weight}"
        fix = "sync=canonical, without shards"
        raise UsageError(what, where="plan.sync, model.kind", fix=fix, code="P12")
