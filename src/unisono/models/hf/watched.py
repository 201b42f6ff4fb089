"""A first run of a foreign model, on the meta device: which layers it repeats, what it gives them, what comes before
and after. Nothing is known of the family; what is seen is what the model's own code does.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unisono.spec.errors import UsageError


@dataclass(frozen=True, slots=True)
class WatchedCall:
    """One call of a module: what it was given, and what it returned. before: how many modules had ended by then; ended:
    which one it was to end."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    began: int
    ended: int


@dataclass(frozen=True, slots=True)
class FirstRun:
    """layers: name of the list of repeated layers. calls: of each of them. before, after: outermost modules that ran
    before the first and after the last of them. around: modules that call them, the model first. feeds: of modules
    before whose results layers are given, such as rotary positions, their calls. result: of the model."""

    layers: str
    calls: tuple[WatchedCall, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    around: tuple[str, ...]
    feeds: tuple[WatchedCall, ...]
    all: tuple[WatchedCall, ...]
    result: Any


def watch(model: nn.Module, inputs: Mapping[str, Any]) -> FirstRun:
    """Run the model once. Raises UsageError P13 where no list of layers is to be seen."""
    layers = _layers_of(model)
    calls: list[WatchedCall] = []
    with _recording(model, calls), torch.no_grad():
        result = model(**inputs)
    each = {call.name: call for call in calls}
    names = [f"{layers}.{i}" for i in range(len(model.get_submodule(layers)))]  # type: ignore[arg-type]
    if not all(name in each for name in names):
        what = f"{type(model).__name__}: {layers} is not run layer by layer"
        raise UsageError(what, where="model.kind", fix="another model", code="P13")
    mine = tuple(each[name] for name in names)
    first, last = mine[0], mine[-1]
    around = [c.name for c in calls if c.began < first.began and c.ended > last.ended]
    before = _outermost([c for c in calls if c.ended < first.began])
    after = _outermost([c for c in calls if c.began > last.ended])
    arguments = {id(value) for call in mine for value in (*call.args, *call.kwargs.values())}
    first_input = _hidden(first)
    feeds = tuple(
        c
        for c in calls
        if c.ended < first.began and id(c.result) in arguments and c.result is not first_input
    )
    return FirstRun(
        layers, mine, tuple(c.name for c in before), tuple(c.name for c in after),
        tuple(sorted(around, key=len)), feeds, tuple(calls), result,
    )  # fmt: skip


def _hidden(call: WatchedCall) -> Any:
    """What a layer changes: its first argument."""
    return call.args[0] if call.args else call.kwargs.get("hidden_states")


def _outermost(calls: list[WatchedCall]) -> list[WatchedCall]:
    """Those that are inside no other one, each module once, in order."""
    names = {c.name for c in calls}
    outer = {}
    for call in calls:
        parents = call.name.split(".")
        inside = any(".".join(parents[:i]) in names for i in range(1, len(parents)))
        if not inside:
            outer.setdefault(call.name, call)
    return list(outer.values())


def _layers_of(model: nn.Module) -> str:
    """The list of modules that holds most weights."""
    lists = {
        name: sum(p.numel() for p in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
    }
    if not lists:
        what = f"{type(model).__name__} has no list of layers"
        raise UsageError(what, where="model.kind", fix="another model", code="P13")
    most = max(lists.values())
    return next(name for name, count in lists.items() if count == most)


@contextmanager
def _recording(model: nn.Module, calls: list[WatchedCall]) -> Iterator[None]:
    clock = [0]
    begun: list[tuple[str, int]] = []

    def before(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            clock[0] += 1
            begun.append((name, clock[0]))

        return hook

    def after(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            clock[0] += 1
            calls.append(WatchedCall(name, args, kwargs, result, begun.pop()[1], clock[0]))

        return hook

    with ExitStack() as stack:
        for name, module in model.named_modules():
            for handle in (
                module.register_forward_pre_hook(before(name), with_kwargs=True),
                module.register_forward_hook(after(name), with_kwargs=True),
            ):
                stack.callback(handle.remove)
        yield


def floats(values: Any) -> Iterator[Tensor]:
    """The floating-point tensors among arguments."""
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point():
            yield value
