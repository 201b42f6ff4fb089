"""Adapters of low rank beside layers that stay as they are (Hu et al., LoRA, 2021), and what else does not learn.

`y = base_layer(x) + alpha / rank · lora_B(lora_A(x))`. The two small layers are ordinary ones, so that plans cut them
like others: where the layer's outputs are dealt, those of `lora_B` are, and where its inputs are, those of `lora_A`.
Their names and their meaning are those of `peft`, whose files they are written into.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from unisono.models.init import Rule, rules_of
from unisono.spec.errors import UsageError
from unisono.spec.layout import Anatomy, Split

_BASE, _A, _B = "base_layer", "lora_A", "lora_B"


class LoraLinear(nn.Module):
    """A linear layer with an adapter beside it."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        about = {"device": base.weight.device, "dtype": base.weight.dtype, "bias": False}
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, rank, **about)
        self.lora_B = nn.Linear(rank, base.out_features, **about)
        self.scale = alpha / rank

    @property
    def weight(self) -> Tensor:
        """Of the layer that it adapts, for whoever asks it for its sizes."""
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x)) * self.scale


def plain(name: str) -> str:
    """The name of a weight as it is without adapters."""
    return name.replace(f".{_BASE}.", ".")


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return name.endswith((f".{_A}.weight", f".{_B}.weight"))


def adapters_of(model: nn.Module) -> frozenset[str]:
    """Names of the parameters of all adapters."""
    return frozenset(getattr(model, "adapters", {}))


def adapt(model: nn.Module, rank: int, alpha: float, targets: Sequence[str]) -> None:
    """Put an adapter beside every linear layer between stem and head that a target names: a glob over its whole name or
    its last word. All else stops to learn. Raises UsageError C06 where a target names none."""
    anatomy: Anatomy = model.anatomy  # type: ignore[assignment]
    rules = dict(rules_of(model))
    fits = dict(_linears(model, anatomy))
    chosen = [name for name in fits if any(_named(target, name) for target in targets)]
    if unmet := [t for t in targets if not any(_named(t, name) for name in fits)]:
        words = sorted({name.rpartition(".")[2] for name in fits})
        raise UsageError(
            f"no layer that could have an adapter is called {unmet[0]}",
            where="train.lora_targets",
            fix=f"some of {', '.join(words)}"
            if words
            else "lora_rank = 0: this model shows no linear layers",
            code="C06",
        )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    adapters: dict[str, Rule] = {}
    for name in chosen:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, LoraLinear(fits[name], rank, alpha))
        # As peft draws them: the first as torch draws a layer, the second zero, so that nothing changes at first.
        adapters[f"{name}.{_A}.weight"] = ("uniform", fits[name].in_features ** -0.5)
        adapters[f"{name}.{_B}.weight"] = ("zeros", 0.0)
    ours = {name for name, _ in model.named_parameters()}
    drawn = {name: adapters.get(name) or rules.get(plain(name)) for name in ours}
    model.initial_rules = lambda: {name: rule for name, rule in drawn.items() if rule}  # type: ignore[assignment]
    model.adapters = adapters  # type: ignore[assignment]
    model.anatomy = adapted(anatomy, [name for name, _ in model.named_modules()], frozenset(chosen))  # type: ignore[assignment]


def choose(model: nn.Module, freeze: Sequence[str], only: Sequence[str]) -> None:
    """Mark which parameters learn. freeze: globs of those that do not. only: of those that do, beside adapters.
    Raises UsageError C06 for a glob that names nothing, and where nothing is left to learn."""
    named = dict(model.named_parameters())
    for key, globs in (("train.freeze", freeze), ("train.train_only", only)):
        for glob in globs:
            if not any(fnmatchcase(plain(name), glob) for name in named):
                near = ", ".join(sorted({plain(name).partition(".")[0] + ".*" for name in named}))
                what = f"no weight has a name like {glob}"
                raise UsageError(what, where=key, fix=f"globs over names: {near}", code="C06")
    adapters = adapters_of(model)
    for name, parameter in named.items():
        learns = any(fnmatchcase(plain(name), glob) for glob in only) if only else parameter.requires_grad
        frozen = any(fnmatchcase(plain(name), glob) for glob in freeze)
        parameter.requires_grad_(name in adapters or (learns and not frozen))
    if not any(p.requires_grad for p in named.values()):
        what = "nothing is left that learns"
        raise UsageError(
            what, where="train.freeze, train.train_only", fix="globs that leave some", code="C06"
        )


def _named(target: str, name: str) -> bool:
    return fnmatchcase(name, target) or fnmatchcase(name.rpartition(".")[2], target)


def _linears(model: nn.Module, anatomy: Anatomy) -> Iterator[tuple[str, nn.Linear]]:
    """Linear layers between stem and head: what looks words up or scores them stays as it is, and so do routers."""
    for name, module in model.named_modules():
        dealt = anatomy.split_of(name)
        if (
            type(module) is nn.Linear
            and name.startswith("blocks.")
            and dealt in (None, Split.COLUMN, Split.ROW)
        ):
            yield name, module


def adapted(anatomy: Anatomy, modules: Sequence[str], chosen: frozenset[str]) -> Anatomy:
    """The anatomy of a model whose layers `chosen` have adapters. modules: names of all of its modules."""
    places = {Split.COLUMN: (_BASE, _B), Split.ROW: (_BASE, _A)}

    def spread(table: Mapping[str, Any], of: Any) -> dict[str, Any]:
        """Entries that speak of some of the chosen are said of each module by its name."""
        made: dict[str, Any] = {}
        for glob, value in table.items():
            met = [name for name in modules if of(glob, name)]
            if not chosen.intersection(met):
                made[glob] = value
                continue
            for name in met:
                parts = places.get(anatomy.split_of(name), ())  # type: ignore[arg-type]
                made |= {f"{name}.{part}": value for part in parts} if name in chosen else {name: value}
        return made

    def speaks(glob: str, name: str) -> bool:
        return Anatomy(splits={glob: Split.COLUMN}).split_of(name) is not None

    return replace(anatomy, splits=spread(anatomy.splits, speaks), units=spread(anatomy.units, speaks))


@torch.no_grad()
def merged(base: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The weight of a layer that does alone what it did with its adapter."""
    return (base.double() + scale * (b.double() @ a.double())).to(base.dtype)
