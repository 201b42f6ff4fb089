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
_ROWS, _BACK = "lora_embedding_A", "lora_embedding_B"


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


class LoraEmbedding(nn.Module):
    """A table of words with an adapter beside it: a narrow table of `rank` columns, and a layer back to its width.

    `peft` keeps the narrow table as [rank, words].
    """

    def __init__(self, base: nn.Embedding, rank: int, alpha: float) -> None:
        super().__init__()
        about = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.base_layer = base
        self.lora_embedding_A = nn.Embedding(base.num_embeddings, rank, base.padding_idx, **about)
        self.lora_embedding_B = nn.Linear(rank, base.embedding_dim, bias=False, **about)
        self.scale = alpha / rank

    @property
    def weight(self) -> Tensor:
        """Of the table that it adapts, for whoever asks it for its sizes."""
        return self.base_layer.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.base_layer(tokens) + self.lora_embedding_B(self.lora_embedding_A(tokens)) * self.scale


def plain(name: str) -> str:
    """The name of a weight as it is without adapters."""
    return name.replace(f".{_BASE}.", ".")


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return name.endswith(tuple(f".{kind}.weight" for kind in (_A, _B, _ROWS, _BACK)))


def adapters_of(model: nn.Module) -> frozenset[str]:
    """Names of the parameters of all adapters."""
    return frozenset(getattr(model, "adapters", {}))


def adapt(model: nn.Module, rank: int, alpha: float, targets: Sequence[str]) -> None:
    """Put an adapter beside every linear layer between stem and head that a target names: a glob over its whole name or
    its last word; and beside a table of words that one names otherwise than by "*". All else stops to learn. Raises
    UsageError C06 where a target names none."""
    anatomy: Anatomy = model.anatomy  # type: ignore[assignment]
    rules = dict(rules_of(model))
    fits: dict[str, nn.Linear | nn.Embedding] = {
        **dict(_linears(model, anatomy)),
        **dict(_tables(model, anatomy)),
    }
    chosen = [
        name for name, layer in fits.items() if any(_chooses(target, name, layer) for target in targets)
    ]
    if unmet := [t for t in targets if not any(_chooses(t, name, layer) for name, layer in fits.items())]:
        raise _unfit(unmet[0], model, anatomy, fits)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    adapters: dict[str, Rule] = {}
    for name in chosen:
        parent, _, leaf = name.rpartition(".")
        # As peft draws them: one of the two is zero, so that nothing changes at first.
        layer = fits[name]
        if isinstance(layer, nn.Linear):
            adapter: nn.Module = LoraLinear(layer, rank, alpha)
            adapters[f"{name}.{_A}.weight"] = ("uniform", layer.in_features**-0.5)
            adapters[f"{name}.{_B}.weight"] = ("zeros", 0.0)
        else:
            adapter = LoraEmbedding(layer, rank, alpha)
            adapters[f"{name}.{_ROWS}.weight"] = ("zeros", 0.0)
            adapters[f"{name}.{_BACK}.weight"] = ("normal", 1.0)
        setattr(model.get_submodule(parent), leaf, adapter)
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


def _chooses(target: str, name: str, layer: nn.Module) -> bool:
    """Every layer is named by "*", but a table only by a word of its own."""
    return _named(target, name) and (isinstance(layer, nn.Linear) or target.strip("*") != "")


def _tables(model: nn.Module, anatomy: Anatomy) -> Iterator[tuple[str, nn.Embedding]]:
    """Tables of words whose weight is no other layer's."""
    for name, module in model.named_modules():
        if (
            type(module) is nn.Embedding
            and anatomy.split_of(name) is Split.VOCAB_IN
            and not _tied(name, anatomy)
        ):
            yield name, module


def _tied(name: str, anatomy: Anatomy) -> str:
    """The other name of a tied weight."""
    both = {a: b for tie in anatomy.ties for a, b in (tie, tie[::-1])}
    return both.get(f"{name}.weight", "")


def _unfit(target: str, model: nn.Module, anatomy: Anatomy, fits: Mapping[str, nn.Module]) -> UsageError:
    """Why nothing that a target names has an adapter."""
    words = sorted({name.rpartition(".")[2] for name in fits})
    named = [(name, module) for name, module in model.named_modules() if name and _named(target, name)]
    why = next(filter(None, (_why_not(name, module, anatomy) for name, module in named)), "")
    return UsageError(
        f"{target} can have no adapter: {why}"
        if why
        else f"no layer that could have an adapter is called {target}",
        where="train.lora_targets",
        fix=f"some of {', '.join(words)}" if words else "lora_rank = 0: this model shows no linear layers",
        code="C06",
    )


def _why_not(name: str, module: nn.Module, anatomy: Anatomy) -> str:
    dealt = anatomy.split_of(name)
    if dealt is Split.ROUTER:
        return f"{name} is a router; train.train_only lets it learn"
    if any(p.dim() == 3 for p in module.parameters(recurse=False)):
        return f"{name} holds all experts as one stack, not as linear layers; train.train_only lets it learn"
    if isinstance(module, nn.Embedding) and (other := _tied(name, anatomy)):
        return f"its weight is also {other}, which a merged adapter would change"
    if isinstance(module, nn.Linear):
        return f"{name} lies outside of the blocks; train.train_only lets it learn"
    return f"{name} is no table of words" if isinstance(module, nn.Embedding) else ""


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
    places = {Split.COLUMN: (_BASE, _B), Split.ROW: (_BASE, _A), Split.VOCAB_IN: (_BASE, _ROWS)}

    def spread(table: Mapping[str, Any], of: Any) -> dict[str, Any]:
        """Entries that speak of some of the chosen are said of each module by its name."""
        spread_out: dict[str, Any] = {}
        for glob, value in table.items():
            met = [name for name in modules if of(glob, name)]
            if not chosen.intersection(met):
                spread_out[glob] = value
                continue
            for name in met:
                parts = places.get(anatomy.split_of(name), ())  # type: ignore[arg-type]
                spread_out |= {f"{name}.{part}": value for part in parts} if name in chosen else {name: value}
        return spread_out

    def speaks(glob: str, name: str) -> bool:
        return Anatomy(splits={glob: Split.COLUMN}).split_of(name) is not None

    return replace(anatomy, splits=spread(anatomy.splits, speaks), units=spread(anatomy.units, speaks))


def pair_of(layer: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """Names of the parameters of an adapter beside a layer: of a linear one, of a table."""
    return (f"{layer}.{_A}.weight", f"{layer}.{_B}.weight"), (
        f"{layer}.{_ROWS}.weight",
        f"{layer}.{_BACK}.weight",
    )


@torch.no_grad()
def merged(base: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The weight of a layer that does alone what it did with its adapter."""
    return (base.double() + scale * (b.double() @ a.double())).to(base.dtype)
