"""Parameters that are rounded for forward and backward, beside masters in which the optimiser steps (Micikevicius et
al., Mixed precision training, 2018).

Where `shard` deals them out, FSDP2 keeps the masters and what is gathered is rounded. Here are those of `shard=1`:
modules hold the rounded parameters, whose gradients are summed in the masters' dtype.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from unisono.parallel.params import add_up_in
from unisono.parallel.pass_context import PassContext, Stages
from unisono.parallel.wires import through_eight_bits

Rounding = Callable[[Tensor], Tensor]


@dataclass(slots=True)
class Refresh:
    """Before a forward: rounds anew what has changed since, by an update or from a checkpoint."""

    pairs: Sequence[tuple[nn.Parameter, nn.Parameter]]  # rounded, master
    rounding: Rounding
    seen: list[int] = field(default_factory=list)

    @torch.no_grad()
    def __call__(self, *_: object) -> None:
        now = [master._version for _, master in self.pairs]
        seen, self.seen = self.seen or [-1] * len(now), now
        for (live, master), before, after in zip(self.pairs, seen, now, strict=True):
            if before != after:
                live.copy_(self.rounding(master))


def rounding_of(context: PassContext) -> Rounding | None:
    """What the plan does to a parameter before products read it; None: nothing."""
    narrow, wire = context.plan.arithmetic.params, context.plan.wires.gather
    if not narrow and not wire:
        return None

    def rounded(x: Tensor) -> Tensor:
        x = x.to(torch.bfloat16) if narrow else x
        return through_eight_bits(x) if wire else x

    return rounded


@torch.no_grad()
def keep_masters(stages: Stages, context: PassContext) -> None:
    """Put a rounded parameter in the place of each; `context.masters` has what they were, by name."""
    rounding = rounding_of(context) or torch.clone
    known: dict[
        int, tuple[Tensor, nn.Parameter, Tensor]
    ] = {}  # by storage, which aliases share and which is held
    for stage in stages.values():
        pairs = []
        for name, live in stage.named_parameters():
            was, learns = live.detach(), live.requires_grad
            place = was.untyped_storage()._cdata
            if place not in known:
                # A copy: else writing to one would count as a change of the other.
                known[place] = was, nn.Parameter(was.clone(), learns), rounding(was)
            _, master, rounded = known[place]
            live.data = rounded
            if learns:
                add_up_in(live, master.dtype)
            context.masters[name] = (
                master if name not in context.owners else nn.Parameter(master.detach(), learns)
            )
            pairs.append((live, master))
        stage.register_forward_pre_hook(Refresh(pairs, rounding))
