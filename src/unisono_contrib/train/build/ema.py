"""What `[ema]` of a recipe adds to a run: an average of each parameter, which every rank keeps of its own part."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from unisono.config import Recipe
from unisono.parallel.offload.param_streaming import at_home
from unisono.parallel.params import Slot
from unisono.sync import Verdict
from unisono.train.data.dataset import Corpus
from unisono.train.step.run import Run
from unisono_contrib.config.sections.ema import EmaConfig

UPDATES = "ema_updates"
"""The number of updates that an average has seen, among what an update keeps."""


def around(section: EmaConfig, recipe: Recipe, corpus: Corpus) -> Callable[[Run], Run]:
    """The run keeps the averages, also when its ranks meet anew."""
    return WeightAverages(section).attach


@dataclass(slots=True)
class WeightAverages:
    """Averages of this rank's masters. by_name: by a slot's name, in float32 or wider; both uses of a tied weight that
    lie in one storage have one. updates: [] float64. slots: each average once, with whose it is."""

    section: EmaConfig
    by_name: dict[str, Tensor] = field(default_factory=dict)
    updates: Tensor | None = None
    slots: list[tuple[Tensor, Slot]] = field(default_factory=list)

    def attach(self, run: Run) -> Run:
        """Follow the run's updates. The averages of a run that has none begin at its weights."""
        if self.updates is None:
            self.updates = torch.zeros((), dtype=torch.float64, device=run.local.device)
            self.by_name, self.slots = copies_of(run)
        run.update = replace(
            run.update,
            averages=self.by_name,
            validates_averages=self.section.validates,
            keeps={**run.update.keeps, UPDATES: self.updates},
            after=(*run.update.after, self.follow),
        )
        return run

    @torch.no_grad()
    def follow(self, verdict: Verdict) -> Mapping[str, Any]:
        """After an update that was applied: average += (1 - decay) * (weights - average).

        Difference, product and sum are operations of their own, each rounded once, so that an element has the same bits
        wherever its tensor is cut."""
        if verdict is not Verdict.APPLY or self.updates is None:
            return {}
        self.updates += 1
        step = 1.0 - self.section.decay_at(int(self.updates) if self.section.warmup else 1)
        for average, slot in self.slots:
            average.add_((at_home(slot.master) - average).mul_(step))
        return {}


def copies_of(run: Run) -> tuple[dict[str, Tensor], list[tuple[Tensor, Slot]]]:
    """(copies of this rank's masters by a slot's name, in float32 or wider; each once, with whose it is). Both uses of
    a tied weight that lie in one storage have one copy."""
    by_name, slots, shared = dict[str, Tensor](), list[tuple[Tensor, Slot]](), dict[tuple[int, int], Tensor]()
    for slot in (slot for slot in run.local.slots if slot.live.requires_grad):
        weights = at_home(slot.master)
        storage = weights.data_ptr(), weights.numel()
        if slot.alias and weights.numel() and storage in shared:
            by_name[slot.name] = shared[storage]
            continue
        wide = torch.promote_types(weights.dtype, torch.float32)
        by_name[slot.name] = shared[storage] = weights.to(wide, copy=True)
        slots.append((by_name[slot.name], slot))
    return by_name, slots
