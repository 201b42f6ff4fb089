"""An optimiser whose state is at home: it steps a few parameters at a time, whose state is there meanwhile."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.parallel.offload.param_streaming import place_of, put_place
from unisono.parallel.offload.store import Home, Store, layout_of, nbytes_of

AT_ONCE = 25 << 20
"""Bytes of state that are there at once, and as much again of those that come next."""


@torch.no_grad()
def stream(optimizer: Optimizer, params: Iterable[nn.Parameter], store: Store) -> None:
    """Put the optimiser's state of some parameters away, and let `step` bring it, and weights that are away, a part at
    a time.

    Between steps `optimizer.state` holds the homes themselves: whoever saves, compares or loads it reads and writes
    them there.
    """
    homes: dict[int, tuple[Home, Tensor]] = {}  # by storage: several entries may be views of one
    chosen = {
        x.untyped_storage()._cdata for p in params for x in _tensors(optimizer.state.get(p, {})) if x.dim()
    }
    for state in optimizer.state.values():
        for key, value in state.items():
            if not isinstance(value, Tensor) or not value.dim() or not value.numel():
                continue
            place = value.untyped_storage()._cdata
            if place not in chosen:
                continue
            if place not in homes:
                home = store.home(nbytes_of(value))
                store.put(value, home)
                homes[place] = home, value  # held, so that no other comes to lie there
            home, layout = homes[place][0], layout_of(value)
            state[key] = layout.of(home.bytes)
            put_place(state[key], home, layout)
    store.settle()
    streamed = _Streamed(optimizer, store)
    optimizer.step = streamed.step  # type: ignore[method-assign]


class _Streamed:
    def __init__(self, optimizer: Optimizer, store: Store) -> None:
        self.optimizer, self.store, self.whole = optimizer, store, optimizer.step
        self.parts = list(
            parts_of([p for group in optimizer.param_groups for p in group["params"]], optimizer)
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step as the optimiser does, part by part."""
        passes = passes_of(self.optimizer)
        for number in range(passes):
            self.optimizer.number = number if passes > 1 else None  # type: ignore[attr-defined]
            self._pass()
        self.optimizer.number = None  # type: ignore[attr-defined]
        self.store.settle()

    def _pass(self) -> None:
        for part, following in zip(self.parts, [*self.parts[1:], ()], strict=True):
            with self._brought(part), only(self.optimizer, part):
                for x in (x for p in following for x in (p, *_tensors(self.optimizer.state[p]))):
                    if (place := place_of(x)) is not None:
                        self.store.ahead(place[0])
                self.whole()

    @contextmanager
    def _brought(self, part: Sequence[nn.Parameter]) -> Iterator[None]:
        """State and weights of `part` are there inside, and go home changed."""
        states, weights = [], []
        for p in part:
            state = self.optimizer.state[p]
            for key, value in state.items():
                if isinstance(value, Tensor) and (place := place_of(value)) is not None:
                    states.append((state, key, value, place[0]))
                    state[key] = place[1].of(self.store.fetch(place[0]))
            if (place := place_of(p)) is not None:
                weights.append((p, p.data, place[0]))
                p.data = place[1].of(self.store.fetch(place[0]))
        try:
            yield
        finally:
            for state, key, value, home in states:
                self.store.put(state[key], home)
                state[key] = value
            for p, nothing, home in weights:
                self.store.put(p.data, home)
                p.data = nothing


def passes_of(optimizer: Optimizer) -> int:
    """How often a step goes through all parameters: 1, or the optimiser's own `passes`, between which ranks meet. Such
    a one makes pass `number` alone where that is not None."""
    return getattr(optimizer, "passes", 1)


def _tensors(state: dict[str, Any]) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)]


def parts_of(params: Sequence[nn.Parameter], optimizer: Optimizer) -> Iterator[list[nn.Parameter]]:
    """In their order, as many at once as have `AT_ONCE` bytes of state."""
    part: list[nn.Parameter] = []
    room = AT_ONCE
    for p in params:
        need = sum(value.nbytes for value in _tensors(optimizer.state[p]))
        if part and need > room:
            yield part
            part, room = [], AT_ONCE
        part.append(p)
        room -= need
    yield part


@contextmanager
def only(optimizer: Optimizer, part: Sequence[nn.Parameter]) -> Iterator[None]:
    """The optimiser has no other parameters inside."""
    chosen, whole = {id(p) for p in part}, [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in chosen]
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = params
