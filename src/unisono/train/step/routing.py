"""What routers did in a step, over all ranks, and what follows for the next one: the votes that balance experts.

Counts are whole numbers, so their sums over ranks are the same in any order, and votes are too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unisono.comm.group import Group
from unisono.models.moe.routing import PARTS, Router
from unisono.parallelize import Local
from unisono.sync import Verdict
from unisono.train.step.scaling import Unscaled


@dataclass(frozen=True, slots=True)
class RouterVotes:
    """After an update routers vote; what they did is told. routers: experts of each of the whole model's, in its order.
    here: this rank's. world: all ranks of the run."""

    routers: Mapping[str, int]
    here: Sequence[tuple[str, Router]]
    world: Group
    device: torch.device

    @torch.no_grad()
    def __call__(self, verdict: Verdict) -> Mapping[str, Any]:
        """Every rank calls it, or it hangs."""
        loads = self.world.all_reduce(self._loads())
        if verdict is Verdict.APPLY:
            for name, router in self.here:
                router.vote(loads[list(self.routers).index(name), :-PARTS])
        return {"router": balance(loads)}

    def _loads(self) -> Tensor:
        """float64 [routers, experts + PARTS], of what this rank's leaves and positions did in the step."""
        names = list(self.routers)
        width = max(self.routers.values()) + PARTS
        loads = torch.zeros(len(names), width, dtype=torch.float64, device=self.device)
        for name, router in self.here:
            for load in router.loads.values():
                loads[names.index(name)] += load
            router.loads.clear()
        return loads


def balance(loads: Tensor) -> Mapping[str, list[float]]:
    """How experts were used, by layer: tokens of the busiest expert over the mean, of the idlest, entropy of a token's
    scores in nats, share of choices for which there was no room."""
    rows = []
    for *counts, tokens, choices, dropped, entropy in loads.tolist():
        mean = max(sum(counts) / len(counts), 1.0)
        rows.append(
            (max(counts) / mean, min(counts) / mean, entropy / max(tokens, 1.0), dropped / max(choices, 1.0))
        )
    names = ("busiest", "idlest", "entropy", "dropped")
    return {name: [round(row[i], 4) for row in rows] for i, name in enumerate(names)}


def router_votes(local: Local, world: Group, scaler: Unscaled) -> tuple[RouterVotes, ...]:
    """What routers do after an update; nothing where the model has none. Every rank calls it."""
    if not local.routers:
        return ()
    here = [
        (name, module)
        for stage in local.stages.values()
        for name, module in stage.named_modules()
        if isinstance(module, Router)
    ]
    for _, router in here:
        router.scale = scaler.factor
    return (RouterVotes(local.routers, here, world, local.device),)
