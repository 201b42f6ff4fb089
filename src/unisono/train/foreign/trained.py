"""What a training loop of another program saved: weights, optimiser state, settings and step, as a source for a run.

Names are those of its module. `matched` layouts lead from ours to theirs, for weights and for whatever an optimiser
keeps like them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from unisono.models.folder import unreadable
from unisono.models.hf.names import Layout
from unisono.models.weights import Shape, Weights, read_box
from unisono.spec.errors import UsageError
from unisono.spec.finder import sister
from unisono.train.state.checkpoint import Box


class Renamed(Weights):
    """Some tensors under other names. names: the new ones to those in `weights`."""

    def __init__(self, weights: Weights, names: Mapping[str, str]) -> None:
        self.where, self._weights, self._names = weights.where, weights, names
        self.shapes = {new: weights.shapes[old] for new, old in names.items()}

    def box(self, name: str, start: Shape, shape: Shape) -> Tensor:
        return self._weights.box(self._names[name], start, shape)


@dataclass(frozen=True, slots=True)
class TrainedState:
    """weights: parameters and buffers. moments: what an optimiser keeps, by key ("exp_avg"), under the parameters'
    names in `weights`. settings: of the optimiser, by parameters' names in `weights`. step: optimiser steps made."""

    weights: Weights
    moments: Mapping[str, Weights]
    settings: Mapping[str, Mapping[str, Any]]
    step: int

    @classmethod
    def joined(
        cls,
        weights: Weights,
        moments: Mapping[str, Weights],
        values: Mapping[str, Any],
        groups: Mapping[str, Mapping[str, Any]],
    ) -> Self:
        """Of parts whose names begin differently. moments, groups: by parameters' names as the optimiser has them.
        values: at the top, among them maybe `step`; groups: or by a group's number, with its `params`.

        Raises UsageError K07 without any optimiser state."""
        known = {name for state in moments.values() for name in state.shapes}
        if not known:
            raise lacks(weights.where, "it holds no optimiser state")
        first = max(known, key=len)
        prefixes = [name.removesuffix(first) for name in weights.shapes if name.endswith(first)]
        prefix = min(
            (p for p in prefixes if all(p + name in weights.shapes for name in known)), default=None, key=len
        )
        if prefix is None:
            raise lacks(weights.where, f"{first} has optimiser state and is no weight")
        under = {k: Renamed(state, {prefix + n: n for n in state.shapes}) for k, state in moments.items()}
        counters, said = moments.get("step"), values.get("step")
        step = int(said) if isinstance(said, int) else 0
        if counters is not None:
            step = max(int(counters.whole(name)) for name in counters.shapes)
        return cls(weights, under, {prefix + name: of for name, of in by_parameter(groups).items()}, step)


def by_parameter(groups: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Settings by parameters' names. groups: by those, or by numbers, with `params`."""
    named = dict[str, Mapping[str, Any]]()
    for of, group in groups.items():
        settings = {key: value for key, value in group.items() if key != "params"}
        named |= dict.fromkeys(group.get("params") or (() if of.isdigit() else (of,)), settings)
    return named


def is_trained(path: Path) -> bool:
    """Whether a training loop of another program has saved something at a path."""
    return any(has_form(path) for has_form, _ in _states())


def _states() -> Sequence[tuple[Callable[[Path], bool], Callable[[Path], "TrainedState"]]]:
    return getattr(sister(__package__ or ""), "STATES", ())


def open_state(path: Path) -> TrainedState:
    """The state that a training loop saved at a path. Raises UsageError: W01 unreadable, W05 refused, K07 without an
    optimiser's state."""
    for has_form, opened in _states():
        if has_form(path):
            return opened(path)
    raise unreadable(path, ValueError("it is no checkpoint of torch.distributed.checkpoint"))


def lacks(where: str, what: str) -> UsageError:
    """K07."""
    return UsageError(
        f"the run cannot go on from this checkpoint: {what}",
        where=where,
        likely="it was saved without its optimiser, or by another one",
        fix="model.weights, or model.load_state_dict, begins from the weights alone",
        code="K07",
    )


@dataclass(frozen=True, slots=True)
class TrainedSource:
    """Such a state as a source of a run's. layout: of the weights, from our names. beside: our names of buffers to
    theirs."""

    state: TrainedState
    layout: Layout
    beside: Mapping[str, str] = field(default_factory=dict)

    def names(self) -> set[str]:
        """The names of all tensors that it has, as checkpoints of ours spell them."""
        kept = {
            f"optim/{name}/{key}"
            for name, parts in self.layout.items()
            for key, state in self.state.moments.items()
            if parts[0].name in state.shapes
        }
        return {f"model/{name}" for name in (*self.layout, *self.beside)} | kept

    def load(self, boxes: Sequence[Box]) -> dict[str, Any]:
        """Fill the boxes in place; returns `step`. Raises UsageError K07 for what it lacks."""
        for box in boxes:
            kind, _, name = box.name.partition("/")
            if kind == "optim":
                name, _, key = name.rpartition("/")
                self._moment(box, name, key)
            elif name in self.layout:
                read_box(self.layout[name], self.state.weights, box.start, box.tensor)
            elif name in self.beside:
                box.tensor.copy_(self.state.weights.whole(self.beside[name]))
            else:
                raise lacks(self.state.weights.where, f"it has no {name}")
        return {"step": self.state.step}

    @torch.no_grad()
    def _moment(self, box: Box, name: str, key: str) -> None:
        parts, state = self.layout.get(name, ()), self.state.moments.get(key)
        if state is None or not parts or any(part.name not in state.shapes for part in parts):
            raise lacks(self.state.weights.where, f"it has no {key} of {name}")
        if not box.full_shape:
            box.tensor.copy_(state.whole(parts[0].name).reshape(()))
        else:
            read_box(parts, state, box.start, box.tensor)
