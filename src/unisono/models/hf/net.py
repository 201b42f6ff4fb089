"""A model of `transformers` as stem, blocks and head: its own modules, run by its own code. It knows nothing of ranks.

The stem is the model's own forward up to its first layer, with layers that hand on what they are given. The head is
its forward from the last layer on, with layers that put in what came, and without what runs before them. A block is a
layer, given what a first run has shown that the model gives it.

Shapes: B batch, T positions, t those of one rank between layers, D width, V vocabulary.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unisono.models.chain import Chain
from unisono.models.hf.attention import CurrentNoise, HeldDropout
from unisono.models.hf.names import Names
from unisono.models.hf.watched import FirstRun, WatchedCall, floats
from unisono.models.init import Rule
from unisono.models.noise import Noise, numbers
from unisono.spec.errors import UsageError
from unisono.spec.layout import Anatomy, Places


class At(nn.Module):
    """int64 [1, T], or [B, T] where samples differ: the positions that lie here, of those of a tensor [B, T, ...].
    `places` says which they are, if not the first. Positions begin anew with each document."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Places | None = None

    def forward(self, x: Tensor, noise: Noise | None) -> Tensor:
        steps = numbers(self.places or Places.whole(x.shape[1]), x.device)
        if noise is not None and noise.documents is not None:
            return noise.documents.positions[:, steps]
        return steps[None]


class Turns(At):
    """What a layer is given of positions, such as the cosines and sines of rotary ones: a module of the library without
    weights, called as it was in the first run."""

    def __init__(self, module: nn.Module, call: WatchedCall) -> None:
        super().__init__()
        self._module_call = module, call  # in a tuple: it belongs to several blocks

    def forward(self, x: Tensor, noise: Noise | None) -> Any:
        module, call = self._module_call
        at = super().forward(x, noise)

        def now(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return x if value.is_floating_point() else at

        return module(*map(now, call.args), **{key: now(value) for key, value in call.kwargs.items()})


class HandOn(nn.Module):
    """In the place of all layers. put: what comes out, if not what goes in."""

    def __init__(self) -> None:
        super().__init__()
        self.put: Tensor | None = None
        self.seen: Tensor | None = None

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        self.seen = x
        return x if self.put is None else self.put


class Aside(nn.Module):
    """In the place of what is computed elsewhere: hands on the first floating-point tensor that it is given, or 0. Who
    asks for a part of it is given that of the module itself, which may be without numbers."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._of = (module,)

    def __getattr__(self, name: str) -> Any:
        return (
            super().__getattr__(name)
            if name in ("_of", "training")
            else getattr(self.__dict__["_of"][0], name)
        )

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return next(floats((*args, *kwargs.values())), torch.zeros(()))


class ForeignStem(nn.Module):
    """Tokens [B, T], or pictures, → [B, t, D]. table: name of the embedding in `base` that is looked up first; "" where
    the model's own code does it. reads: by which name inputs are given otherwise."""

    def __init__(self, base: nn.Module, layers: HandOn, table: str, reads: str, held: CurrentNoise) -> None:
        super().__init__()
        self.base, self.table, self.reads, self.held = base, table, reads, held
        self.places: Places | None = None
        self._layers = (layers,)

    def forward(self, inputs: Tensor, noise: Noise | None = None) -> Tensor:
        self.held.noise = noise
        if not self.table:
            self.base(**{self.reads: inputs})
        else:
            x_BtD = self.base.get_submodule(self.table)(inputs)
            at = At()
            at.places = self.places
            self.base(inputs_embeds=x_BtD, position_ids=at(x_BtD, noise), use_cache=False)
        layers = self._layers[0]
        x, layers.seen = layers.seen, None
        return x  # type: ignore[return-value]


class ForeignBlock(nn.Module):
    """One layer, [B, t, D] → [B, t, D]. call: of this layer in the first run. turns: of its arguments those that are
    computed of positions."""

    def __init__(
        self, layer: nn.Module, call: WatchedCall, turns: Mapping[str, Turns], held: CurrentNoise
    ) -> None:
        super().__init__()
        self.layer, self.held = layer, held
        self.turns = nn.ModuleDict(dict(turns))
        self.at = At()
        self._call = call

    def forward(self, x: Tensor, noise: Noise | None = None) -> Tensor:
        self.held.noise = noise
        arguments = {key: turn(x, noise) for key, turn in self.turns.items()}
        args = [self._now(value, noise, x) for value in self._call.args]
        kwargs = {
            key: self._now(value, noise, x)
            for key, value in self._call.kwargs.items()
            if key not in arguments
        }
        first = {} if args else {"hidden_states": x}
        y = self.layer(*([x, *args[1:]] if args else ()), **{**kwargs, **first, **arguments})
        return y[0] if isinstance(y, tuple) else y

    def _now(self, value: Any, noise: Noise | None, x: Tensor) -> Any:
        return self.at(x, noise) if isinstance(value, Tensor) and not value.is_floating_point() else value


class ForeignHead(nn.Module):
    """[B, t, D] → logits [B, t, V], or [B, classes]. reads: by which name the model takes what stands for inputs."""

    def __init__(self, model: nn.Module, layers: HandOn, reads: str, more: Mapping[str, Any]) -> None:
        super().__init__()
        self.model, self.reads, self.more = model, reads, more
        self._layers = (layers,)

    def forward(self, x: Tensor) -> Tensor:
        layers = self._layers[0]
        layers.put = x
        logits = self.model(**{self.reads: x, **self.more}).logits
        layers.put = layers.seen = None
        return (
            logits.clone() if logits._is_view() else logits
        )  # FSDP2 hooks its outputs, and a view may be written to


class ForeignModel(Chain):
    """`forward(inputs, noise) → logits`. names: of its weights, ours and theirs. config: of transformers. notes: what
    was inferred, a line each."""

    def __init__(
        self,
        parts: tuple[nn.Module, Sequence[nn.Module], nn.Module],
        anatomy: Anatomy,
        rules: Mapping[str, Rule],
        names: Names,
        config: Any,
        notes: Sequence[str],
    ) -> None:
        stem, blocks, head = parts
        super().__init__(stem, nn.ModuleList(blocks), head, anatomy)
        self.names, self.config, self.notes = names, config, tuple(notes)
        self._rules = rules

    def initial_rules(self) -> Mapping[str, Rule]:
        """The family's own, by our names."""
        return self._rules


def stem_of(base: nn.Module, seen: FirstRun, prefix: str, table: str, reads: str) -> ForeignStem:
    """Of the model without its last layers. prefix: of the base model's names in the whole one's, such as "model."."""
    layers = HandOn()
    aside: dict[str, nn.Module] = {
        name: Aside(base.get_submodule(name.removeprefix(prefix)))
        for name in seen.after
        if name.startswith(prefix)
    }
    feeds = [call.name for call in seen.feeds]
    aside |= {name: Aside(base.get_submodule(name.removeprefix(prefix))) for name in feeds}
    put = {name.removeprefix(prefix): module for name, module in aside.items()}
    put[seen.layers.removeprefix(prefix)] = nn.ModuleList([layers])
    return ForeignStem(with_parts(base, put), layers, table, reads, _held_by(base, seen.before, prefix))


def _held_by(base: nn.Module, names: Sequence[str], prefix: str) -> CurrentNoise:
    held = CurrentNoise()
    for name in names:
        for module in base.get_submodule(name.removeprefix(prefix)).modules():
            if isinstance(module, HeldDropout):
                module.held = held
    return held


def head_of(
    model: nn.Module, seen: FirstRun, reads: str, more: Mapping[str, Any], held: CurrentNoise
) -> ForeignHead:
    """Of the whole model without what runs before the last layer. held: of the last block."""
    layers = HandOn()
    put: dict[str, nn.Module] = {name: Aside(model.get_submodule(name)) for name in seen.before}
    put[seen.layers] = nn.ModuleList([layers])
    for name in seen.after:
        for module in model.get_submodule(name).modules():
            if isinstance(module, HeldDropout):
                module.held = held
    return ForeignHead(with_parts(model, put), layers, reads, more)


def block_of(model: nn.Module, seen: FirstRun, index: int) -> ForeignBlock:
    """The layer of this number. Raises UsageError P13 where it is given numbers that are none of positions."""
    call = seen.calls[index]
    _check_given(model, seen, call)
    layer = model.get_submodule(call.name)
    held = CurrentNoise()
    for module in layer.modules():
        if hasattr(module, "held"):
            module.held = held  # type: ignore[assignment]
    sources = {id(feed.result): feed for feed in seen.feeds}
    turns = {
        key: Turns(model.get_submodule(sources[id(value)].name), sources[id(value)])
        for key, value in call.kwargs.items()
        if id(value) in sources
    }
    return ForeignBlock(layer, call, turns, held)


def _check_given(model: nn.Module, seen: FirstRun, call: WatchedCall) -> None:
    sources = {id(feed.result): feed.name for feed in seen.feeds}
    names = [
        *(("", x) for x in call.args[1:]),
        *((k, x) for k, x in call.kwargs.items() if k != "hidden_states"),
    ]
    for key, value in names:
        name = sources.get(id(value), "")
        learns = name and any(True for _ in model.get_submodule(name).parameters())
        if learns or (not name and isinstance(value, Tensor) and value.is_floating_point()):
            what = f"{call.name} is given {key or 'numbers'} {f'by {name}, which learns' if learns else 'of its own'}"
            fix = "a model whose layers are given what they hand on, and positions"
            raise UsageError(what, where="model.kind", fix=fix, code="P13")


def with_parts(module: nn.Module, put: Mapping[str, nn.Module]) -> nn.Module:
    """The same module with some of its parts, by name, replaced; the rest is shared, and nothing is changed."""
    clone = copy.copy(module)
    clone._modules = dict(module._modules)
    clone._parameters, clone._buffers = dict(module._parameters), dict(module._buffers)
    inner: dict[str, dict[str, nn.Module]] = {}
    for name, part in put.items():
        first, _, rest = name.partition(".")
        if rest:
            inner.setdefault(first, {})[rest] = part
        else:
            clone._modules[first] = part
    for first, parts in inner.items():
        clone._modules[first] = with_parts(module._modules[first], parts)  # type: ignore[arg-type]
    return clone
