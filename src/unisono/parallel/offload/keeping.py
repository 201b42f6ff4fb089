"""What autograd keeps of a part of a stage, kept at home: activations, copied there as they are saved and back as
backward comes near, and weights, which are there already."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from unisono.parallel.offload.param_streaming import Lender, parts_of
from unisono.parallel.offload.store import Home, Layout, Store, layout_of, nbytes_of
from unisono.parallel.pass_context import PassContext, Stages

SMALL = 4096
"""Bytes up to which an activation stays: one page, and less than it costs to name it."""


class Entry:
    """One storage that lies at home until the last node of the graph that needs it has gone."""

    def __init__(self, store: Store, home: Home, passing: bool, frame: "KeptPass") -> None:
        self._store, self._home, self._passing, self._frame = store, home, passing, frame
        self._there: Tensor | None = None

    def tensor(self) -> Tensor:
        """Its bytes on the device; a weight's anew for each that asks, so that a block's are not there all at once."""
        self._frame.near()
        if not self._passing:
            return self._store.fetch(self._home)
        if self._there is None:
            self._there = self._store.fetch(self._home)
        return self._there

    def ahead(self) -> None:
        if self._there is None:
            self._store.ahead(self._home)

    def __del__(self) -> None:
        if self._passing:
            self._store.leave(self._home)


class KeptPass:
    """What one forward pass of a part has put away. before: that of the part before, to which backward comes next."""

    def __init__(self, before: "KeptPass | None") -> None:
        self.entries: list[weakref.ref[Entry]] = []
        self._before, self._is_near = before, False

    def near(self) -> None:
        """Backward has come here: what it needs next is asked for."""
        if self._is_near:
            return
        self._is_near = True
        if self._before is not None:
            for entry in filter(None, (ref() for ref in self._before.entries)):
                entry.ahead()


class _Packed(NamedTuple):
    entry: Entry
    layout: Layout


class Keeper:
    """The hooks of one part. before: of the part before it. all: activations too, not weights alone."""

    def __init__(
        self, part: nn.Module, store: Store, lender: Lender | None, everything: bool, before: "Keeper | None"
    ) -> None:
        self.part, self.store, self.lender, self.everything, self.before = (
            part,
            store,
            lender,
            everything,
            before,
        )
        self.frame: KeptPass | None = None  # of the newest forward pass

    def forward(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        frame = self.frame = KeptPass(self.before.frame if self.before is not None else None)
        if self.before is not None:
            self.before.frame = None
        storages = {p.untyped_storage()._cdata for p in self.part.parameters()}
        seen: dict[
            int, tuple[Entry, Tensor]
        ] = {}  # holds what it knows by its place: nobody else may lie there
        with saved_tensors_hooks(partial(self._pack, frame, storages, seen), _unpack):
            try:
                return inner(*args, **kwargs)
            finally:
                seen.clear()  # the graph keeps the hooks, and would keep these with them

    def _pack(
        self, frame: KeptPass, storages: set[int], seen: dict[int, tuple[Entry, Tensor]], x: Tensor
    ) -> Tensor | _Packed:
        place = x.untyped_storage()._cdata
        home = self.lender.lent.get(place) if self.lender is not None else None
        if home is None and (
            not self.everything or place in storages or nbytes_of(x) <= SMALL or x.device != self.store.device
        ):
            return x
        if place not in seen:
            passing = home is None
            if home is None:
                home = self.store.home(nbytes_of(x))
                self.store.put(x, home)
            seen[place] = Entry(self.store, home, passing, frame), x if passing else x.new_empty(0)
            frame.entries.append(weakref.ref(seen[place][0]))
        return _Packed(seen[place][0], layout_of(x))


def _unpack(packed: Tensor | _Packed) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed.layout.of(packed.entry.tensor())


def keep_at_home(stages: Stages, context: PassContext) -> None:
    """Wrap the parts of each stage, around what may compute them again. A stem keeps what it is given, and that stays:
    of activations the blocks' and the head's go."""
    for stage in stages.values():
        before: Keeper | None = None
        for part, away in parts_of(stage, context):
            if not (away.params or away.activations):
                continue
            before = Keeper(part, context.store, context.lenders.get(part), away.activations, before)
            part.forward = partial(before.forward, part.forward)  # type: ignore[method-assign]
