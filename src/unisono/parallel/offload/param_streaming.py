"""Weights that are at home between their uses: each part of a stage (stem, a block, head) is lent its own while it
computes forward, and backward fetches a weight again where a product needs it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from unisono.parallel.cut import Stage
from unisono.parallel.offload.store import Home, Layout, Store, layout_of, nbytes_of
from unisono.parallel.pass_context import PassContext, Stages
from unisono.plan.blocks import Away

_AWAY = "unisono_home"  # under which a tensor that is away holds where, and how it lies there


class Lender:
    """The weights of one part of a stage. before, after: its neighbours."""

    def __init__(self, part: nn.Module, store: Store) -> None:
        self.params, self.store = tuple(part.parameters()), store
        self.uses = [
            (module, name, p)
            for module in part.modules()
            for name, p in module._parameters.items()
            if p is not None
        ]
        self.before: Lender | None = None
        self.after: Lender | None = None
        self.lent: dict[int, Home] = {}  # by where what was fetched lies; only while it is lent

    @contextmanager
    def lend(self) -> Iterator[None]:
        """Weights are there inside, and nobody's afterwards but those of whom backward has kept one."""
        away = [(p, *place) for p in self.params if (place := place_of(p)) is not None]
        empty = [p.data for p, *_ in away]
        # What is computed again keeps a weight that does not learn as it is, not an alias of it
        # (torch.utils.checkpoint): another parameter stands for it, whose numbers stay.
        frozen = [use for use in self.uses if not use[2].requires_grad and place_of(use[2]) is not None]
        try:
            for p, home, layout in away:
                p.data = layout.of(self.store.fetch(home))
                self.lent[p.untyped_storage()._cdata] = home
            for module, name, p in frozen:
                module._parameters[name] = nn.Parameter(p.data, requires_grad=False)
            backward = torch._C._current_graph_task_id() != -1
            if (neighbour := self.before if backward else self.after) is not None:
                neighbour.ahead()
            yield
        finally:
            self.lent = {}
            for module, name, p in frozen:
                module._parameters[name] = p
            for (p, *_), nothing in zip(away, empty, strict=True):
                p.data = nothing

    def ahead(self) -> None:
        """Begin to bring these weights, which are needed soon."""
        for p in self.params:
            if (place := place_of(p)) is not None:
                self.store.ahead(place[0])


def place_of(x: Tensor) -> tuple[Home, Layout] | None:
    """The memory in which a tensor lies between its uses; None where it is never moved."""
    return getattr(x, _AWAY, None)


def put_place(x: Tensor, home: Home, layout: Layout) -> None:
    """Note where a tensor is between its uses."""
    setattr(x, _AWAY, (home, layout))


def at_home(x: Tensor) -> Tensor:
    """A tensor's numbers, to be read and written, between steps."""
    place = place_of(x)
    return x.detach() if place is None else place[1].of(place[0].bytes)


@torch.no_grad()
def send_home(params: Sequence[nn.Parameter], store: Store) -> None:
    """Put weights away. What stands for them has their shape, is nowhere in memory, and is not a number. Uses of one
    storage have one home."""
    homes: dict[int, tuple[Home, Tensor]] = {}
    for p in params:
        if place_of(p) is not None or not p.numel():
            continue
        key = p.untyped_storage()._cdata
        if key not in homes:
            home = store.home(nbytes_of(p))
            store.put(p.data, home)
            homes[key] = home, p.new_full((), float("nan"))
        home, nothing = homes[key]
        put_place(p, home, layout_of(p))
        p.data = nothing.expand(p.shape)
    store.settle()


def lend(stages: Stages, context: PassContext) -> None:
    """Wrap the parts of each stage whose weights are away, inside what may compute them again."""
    for stage in stages.values():
        lenders = []
        for part, away in parts_of(stage, context):
            if not away.params:
                continue
            lender = Lender(part, context.store)
            lenders.append(lender)
            context.lenders[part] = lender
            part.forward = partial(_lent, lender, part.forward)  # type: ignore[method-assign]
        for first, second in pairwise(lenders):
            first.after, second.before = second, first


def parts_of(stage: Stage, context: PassContext) -> list[tuple[nn.Module, Away]]:
    """Stem, blocks and head, those that are here, and what of each is away."""
    ends = [(getattr(stage, name), context.away(name)) for name in ("stem", "head") if hasattr(stage, name)]
    blocks = [(block, context.away(f"blocks.{name}")) for name, block in stage.blocks.items()]
    return [*ends[: stage.first], *blocks, *ends[stage.first :]]


def _lent(lender: Lender, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with lender.lend():
        return forward(*args, **kwargs)
