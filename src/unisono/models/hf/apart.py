"""A foreign model that has been run once → stem, blocks and head, with names, anatomy and rules."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from unisono.models.hf.anatomy import Ends, LayerFacts, anatomy_of, layer_found, merged
from unisono.models.hf.attention import HeldDropout
from unisono.models.hf.files import layout_of_files
from unisono.models.hf.names import NamedPart, Names
from unisono.models.hf.net import ForeignModel, block_of, head_of, stem_of
from unisono.models.hf.swap import Origins
from unisono.models.hf.watched import FirstRun
from unisono.models.init import Rule
from unisono.spec.layout import Anatomy, Split


@dataclass(frozen=True, slots=True)
class Making:
    """A model of the library, swapped where needed, and what is known of it.

    seen: its first run. origins: see `swap`. theirs: id of a parameter → its name. their_ties: alias → owner. rules: of
    initial weights, by their names. reads: name of its main input. context: tokens of a sample, 0 for pictures. table:
    name of its embedding, "" where it has none. dealt: of the one in it that `tp` could deal.
    """

    model: Any
    seen: FirstRun
    origins: Origins
    theirs: Mapping[int, str]
    their_ties: Mapping[str, str]
    rules: Mapping[str, Rule]
    reads: str
    context: int
    table: str
    dealt: str

    @property
    def base(self) -> str:
        """Name of the model inside of the whole one, "" where there is none."""
        return self.seen.around[1] if len(self.seen.around) > 1 else ""

    @property
    def looked_up(self) -> str:
        """Name in the base model of the embedding, where that is all that a token meets by itself; else ""."""
        inside = self.table in self.seen.before
        return self.table.removeprefix(f"{self.base}.") if self.table and inside else ""


def taken_apart(of: Making) -> ForeignModel:
    """The model as ours."""
    seen, text = of.seen, of.reads == "input_ids"
    prefix = f"{of.base}." if of.base else ""
    stem = stem_of(of.model.get_submodule(of.base), seen, prefix, of.looked_up, of.reads)
    blocks = [block_of(of.model, seen, i) for i in range(len(seen.calls))]
    more = {"use_cache": False} if text else {}
    head = head_of(of.model, seen, "inputs_embeds" if text else of.reads, more, blocks[-1].held)
    parts = nn.ModuleDict({"stem": stem, "blocks": nn.ModuleList(blocks), "head": head})
    names = names_of(parts, of)
    usual: Rule = ("normal", float(getattr(of.model.config, "initializer_range", 0.02)))
    rules = {name: of.rules.get(weights[0].name, usual) for name, weights in names.modules.items()}
    anatomy = _anatomy(parts, of, names)
    return ForeignModel(
        (stem, blocks, head), anatomy, rules, names, of.model.config, list(_notes(of, anatomy))
    )


def names_of(parts: nn.Module, of: Making) -> Names:
    """Ours and theirs, found by the parameters themselves."""
    modules: dict[str, tuple[NamedPart, ...]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    owner: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, parameter in parts.named_parameters(remove_duplicate=False):
        if owner.setdefault(id(parameter), name) != name:
            ties[name] = owner[id(parameter)]
            continue
        shape = tuple(parameter.shape)
        zeros = (0,) * len(shape)
        swapped = parameter in of.origins
        plain = () if swapped else (NamedPart(of.theirs[id(parameter)], zeros, shape, zeros),)
        shapes[name], modules[name] = shape, of.origins.get(parameter, plain)
    files = layout_of_files(modules, of.model)
    return Names(shapes, modules, files, ties, dict(of.their_ties))


def _anatomy(parts: Any, of: Making, names: Names) -> Anatomy:
    model, seen, ties = of.model, of.seen, tuple(names.ties.items())
    if not of.looked_up or not _is_causal(parts):
        uncut = "tp splits language models whose attention looks back; this one sees all positions"
        return anatomy_of(_layer_facts(parts, of), Ends("", "", ()), sequence=0, ties=ties, uncut=uncut)
    facts = _layer_facts(parts, of)
    head = seen.after[-1]
    odd = [*facts.odd]
    if not isinstance(model.get_submodule(head), nn.Linear):
        odd.append(f"{head}, which is no plain classifier")
    if not of.dealt:
        odd.append(f"{of.table}, which is no plain embedding")
    drops = [
        n for n, m in parts.named_modules() if isinstance(m, HeldDropout) and not n.startswith("blocks.")
    ]
    table = of.dealt.removeprefix(f"{of.base}.")
    ends = Ends(f"stem.base.{table}", f"head.model.{head}", tuple(drops))
    uncut = f"tp cannot split {'; '.join(odd)}" if odd else ""
    return anatomy_of(facts, ends, sequence=of.context, ties=ties, uncut=uncut)


def _layer_facts(parts: Any, of: Making) -> LayerFacts:
    """Of all layers."""
    width = of.model.config.hidden_size
    return merged(
        [
            layer_found(block.layer, _order(of.seen, call.name), _published(of.model, call.name), width)
            for block, call in zip(parts["blocks"], of.seen.calls, strict=True)
        ]
    )


def _order(seen: FirstRun, layer: str) -> list[str]:
    """Modules of a layer as they were called."""
    return [c.name.removeprefix(f"{layer}.") for c in seen.all if c.name.startswith(f"{layer}.")]


def _published(model: Any, layer: str) -> dict[str, str]:
    """What the library publishes of a layer for tp: glob inside the layer → how."""
    stars = ".".join("*" if part.isdigit() else part for part in layer.split("."))
    plan = getattr(model, "_tp_plan", None) or {}
    return {glob.removeprefix(f"{stars}."): how for glob, how in plan.items() if glob.startswith(f"{stars}.")}


def _is_causal(parts: nn.Module) -> bool:
    cores = [m for n, m in parts.named_modules() if n.endswith(".core")]
    return bool(cores) and all(core.causal for core in cores)


def _notes(of: Making, anatomy: Anatomy) -> Iterator[str]:
    """What was inferred, in words."""
    seen = of.seen
    parts = ", ".join(seen.before), f"{len(seen.calls)} blocks {seen.layers}", ", ".join(seen.after)
    yield f"{type(of.model).__name__}: stem {parts[0]}; {parts[1]}; head {parts[2]}"
    for alias, owner in anatomy.ties:
        yield f"tied: {alias} is {owner}"
    for split in Split:
        dealt = [name for name, kind in anatomy.splits.items() if kind is split]
        if dealt:
            yield f"{split.value}: {', '.join(dealt)}"
    if anatomy.uncut:
        yield anatomy.uncut
