"""Where a foreign model may be cut, inferred from its modules and from the plan for `tp` that its library publishes.

A layer is cut as Megatron cuts one (Shoeybi et al., 2019): what leads into attention or into a hidden width is dealt by
outputs, what leads out of it by inputs. Inside such a pair a module sees all positions, and those that `tp` deals
between layers are gathered where the pair begins. What fits nowhere keeps `tp` away, and is named.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from unisono.models.hf.attention import ForeignCore, HeldDropout
from unisono.models.hf.swap import ForeignExperts, FusedHeads
from unisono.spec.layout import Anatomy, Split, Units

_COLUMN = ("colwise", "colwise_rep", "colwise_gather_output", "local_colwise")
_ROW = ("rowwise", "rowwise_rep", "local_rowwise")


@dataclass(slots=True)
class LayerFacts:
    """What was inferred of one layer, by names inside of it. odd: what cannot be dealt, with the reason."""

    splits: dict[str, Split] = field(default_factory=dict)
    units: dict[str, Units] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    odd: list[str] = field(default_factory=list)


def layer_found(layer: nn.Module, order: list[str], published: Mapping[str, str], width: int) -> LayerFacts:
    """Of one layer. order: its modules as they were called. published: glob inside the layer → how it is cut, {} where
    nothing is published. width: of the residual stream."""
    facts = LayerFacts()
    for name, core in layer.named_modules():
        if isinstance(core, ForeignCore):
            _attention(layer, name.rpartition(".")[0], order, published, facts)
    for name, module in layer.named_modules():
        if isinstance(module, ForeignExperts):
            facts.splits[f"{name}.stack"] = Split.EXPERTS
            facts.sizes["hidden width"] = module.stack.full_width
        elif isinstance(module, HeldDropout):
            facts.splits[name] = Split.SEQUENCE_DROPOUT
    _hidden_widths(layer, order, published, facts, width)
    facts.odd += _whole_inside(layer, facts)
    return facts


def _attention(
    layer: nn.Module, name: str, order: list[str], published: Mapping[str, str], facts: LayerFacts
) -> None:
    """Projections of one attention: those before its core by outputs, the one after it by inputs, in whole groups of
    heads."""
    attention: Any = layer.get_submodule(name)
    inside = [n for n in order if n.startswith(f"{name}.") and isinstance(layer.get_submodule(n), nn.Linear)]
    at = order.index(f"{name}.core")
    ahead, behind = ([n for n in inside if (order.index(n) < at) is first] for first in (True, False))
    heads, groups, each = attention.shown
    for projection, ways, split in (
        *((n, _COLUMN, Split.COLUMN) for n in ahead),
        *((n, _ROW, Split.ROW) for n in behind),
    ):
        linear: Any = layer.get_submodule(projection)
        size = linear.out_features if split is Split.COLUMN else linear.in_features
        fused = isinstance(layer.get_submodule(projection.rpartition(".")[0]), FusedHeads)
        if published and not _is(published, projection, ways):
            facts.odd.append(f"{projection}, which the published plan leaves whole")
        elif size not in (heads * each, groups * each) and not fused:
            facts.odd.append(
                f"{projection}, whose {size} features are not those of {heads} heads or {groups} keys"
            )
        facts.splits[projection], facts.units[projection] = split, Units(groups, size // groups)
    facts.splits[f"{name}.core"] = Split.CORE
    facts.splits[f"{name}.drop"] = Split.HEAD_DROPOUT
    facts.units[f"{name}.drop"] = Units(groups, heads // groups)
    facts.splits[name] = Split.GATHERED
    facts.sizes |= {"heads": heads, "key/value heads": groups}


def _is(published: Mapping[str, str], name: str, ways: tuple[str, ...]) -> bool:
    """Whether the published plan cuts a module in one of these ways; of a swapped one its old name counts."""
    return any(fnmatchcase(name, glob) and way in ways for glob, way in published.items())


def _hidden_widths(
    layer: nn.Module, order: list[str], published: Mapping[str, str], facts: LayerFacts, width: int
) -> None:
    """Pairs of layers from the residual stream to a hidden width and back, beside attention."""
    parents: dict[str, list[str]] = {}
    for name in order:
        if isinstance(layer.get_submodule(name), nn.Linear) and name not in facts.splits:
            parents.setdefault(name.rpartition(".")[0], []).append(name)
    for parent, names in parents.items():
        *ahead, last = names
        into: Any = [layer.get_submodule(n) for n in ahead]
        out: Any = layer.get_submodule(last)
        fits = all((m.in_features, m.out_features) == (width, out.in_features) for m in into)
        if not ahead or not fits or out.out_features != width or not parent:
            facts.odd += [f"{n}, which belongs to no pair of layers" for n in names]
            continue
        published_so = all(_is(published, n, _COLUMN) for n in ahead) and _is(published, last, _ROW)
        if published and not published_so:
            facts.odd.append(f"{parent}, which the published plan leaves whole")
        facts.splits |= dict.fromkeys(ahead, Split.COLUMN) | {last: Split.ROW, parent: Split.GATHERED}
        facts.sizes["hidden width"] = out.in_features


def _whole_inside(layer: nn.Module, facts: LayerFacts) -> Iterator[str]:
    """Weights that stay whole although they see some features alone; those of one head's width see heads one by one."""
    regions = [name for name, split in facts.splits.items() if split is Split.GATHERED]
    for name, parameter in layer.named_parameters():
        module = name.rpartition(".")[0]
        if module in facts.splits or not any(name.startswith(f"{region}.") for region in regions):
            continue
        attention: Any = layer.get_submodule(next(r for r in regions if name.startswith(f"{r}.")))
        shown = getattr(attention, "shown", None)
        if shown is None or tuple(parameter.shape) != (shown[2],):
            yield f"{name}, a weight between split features"


def merged(each: list[LayerFacts]) -> LayerFacts:
    """Of all layers, which may be of several kinds. What one deals and another does not, of the same name, is odd."""
    whole = LayerFacts()
    for facts in each:
        for mine, theirs in (
            (whole.splits, facts.splits),
            (whole.units, facts.units),
            (whole.sizes, facts.sizes),
        ):
            whole.odd += [
                f"{n}, which layers have in two ways" for n in mine if theirs.get(n, mine[n]) != mine[n]
            ]
            mine.update(theirs)  # type: ignore[arg-type]
        whole.odd += facts.odd
    whole.odd = list(dict.fromkeys(whole.odd))
    return whole


@dataclass(frozen=True, slots=True)
class Ends:
    """What of stem and head may be dealt. table, out: names of embedding and classifier; "" where there is none that
    can be. drops: of dropouts of the stem."""

    table: str
    out: str
    drops: tuple[str, ...]


def anatomy_of(
    facts: LayerFacts, ends: Ends, *, sequence: int, ties: tuple[tuple[str, str], ...], uncut: str
) -> Anatomy:
    """Of the whole model. sequence: 0 where positions cannot be dealt. uncut: why tp cannot deal it, "" if it can."""
    cores = tuple(f"blocks.*.layer.{n}" for n, split in facts.splits.items() if split is Split.CORE)
    if not sequence:
        return Anatomy(ties=ties, again=cores, uncut=uncut)
    always = (
        Split.CORE,
        Split.SEQUENCE_DROPOUT,
        Split.EXPERTS,
    )  # positions and experts are dealt without heads
    kept = {n: s for n, s in facts.splits.items() if not uncut or s in always}
    splits = {f"blocks.*.layer.{name}": split for name, split in kept.items()}
    splits |= {"blocks.*.at": Split.ROTARY, "blocks.*.turns.*": Split.ROTARY, "stem": Split.POSITIONS}
    splits |= dict.fromkeys(ends.drops, Split.SEQUENCE_DROPOUT)
    if not uncut:
        splits |= {ends.table: Split.VOCAB_IN, ends.out: Split.VOCAB_OUT}
    return Anatomy(
        splits=splits,
        divides=facts.sizes,
        units={f"blocks.*.layer.{name}": units for name, units in facts.units.items()},
        ties=ties,
        sequence=sequence,
        cross_entropy=True,
        again=cores,
        uncut=uncut,
    )
