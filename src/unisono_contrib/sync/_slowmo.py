"""The live part of `slowmo`: rounds whose outer optimiser counts in units of the learning rate."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import SGD

from unisono.sync._outer import Site
from unisono_contrib.sync._rounds import RoundsSync, Timing


def mean_rate(rate: Callable[[int], float], timing: Timing, step: int) -> float:
    """The mean learning rate of the steps of the round that ends with `step`, which has fewer than h steps if it is the
    last."""
    first = timing.warmup + (step - timing.warmup) // timing.h * timing.h
    return sum(map(rate, range(first, step + 1))) / (step + 1 - first)


class SlowMomentum(SGD):
    """u ← beta u + d / rate, then x ← x - alpha · rate · u, where d is how far weights came in a round at the learning
    rate `rate`. In these units a momentum stays right while the learning rate changes."""

    rate: float = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One outer step. At a rate of zero nothing was learnt, and no weight moves."""
        if not self.rate:
            return
        for group in self.param_groups:
            group["lr"] = self.defaults["lr"] * self.rate
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(self.rate)
        super().step()


class SlowMoSync(RoundsSync):
    """State: as of `RoundsSync`, of which `NAME/outer_momentum` is the slow momentum, in units of the learning rate."""

    def __init__(self, site: Site, timing: Timing, slow_lr: float, slow_momentum: float) -> None:
        super().__init__(site, timing, partial(SlowMomentum, lr=slow_lr, momentum=slow_momentum))

    def merge(self, step: int) -> None:
        for fragment in self._due:
            fragment.optimizer.rate = mean_rate(self.site.rate, self.timing, step)  # type: ignore[attr-defined]
        super().merge(step)
