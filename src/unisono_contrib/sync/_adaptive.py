"""The live part of `adaptive`: rounds whose length all replicas choose alike, by the losses of their meetings."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.sync._outer import Site
from unisono_contrib.sync._rounds import Fragment, RoundsSync, Timing, nesterov

PERIOD, NEXT, FIRST, TOTAL, COUNT = range(5)


def shorter(period: int, h: int, loss: float, first: float, gamma: float) -> int:
    """Steps of a round from here on. period: until now. h: at the start. loss: now. first: at the start."""
    wanted = math.ceil(h * math.sqrt(max(loss, 0.0) / first)) if first > 0.0 else period
    return max(1, wanted if wanted < period else math.ceil(gamma * period))


class AdaptiveSync(RoundsSync):
    """State, alike on all replicas: `adaptive`, float64 [5]: steps of a round; the step after which they meet next; the
    loss of the first meeting (nan before it); the sum and the number of the losses since the last choice."""

    def __init__(self, site: Site, h: int, every: int, gamma: float) -> None:
        super().__init__(site, Timing(h), nesterov(1.0, 0.0))
        self.h, self.every, self.gamma = h, every, gamma
        self.clock = torch.tensor([h, h - 1, math.nan, 0.0, 0.0], dtype=torch.float64)
        self._loss = math.nan
        self._chosen: int | None = None  # to be told

    def _sent(self, step: int) -> Iterator[Fragment]:
        return iter(self.fragments if step >= int(self.clock[NEXT]) or step + 1 == self.timing.steps else ())

    def take_loss(self, step: int, loss: float) -> None:
        super().take_loss(step, loss)
        self._loss = loss

    def merge(self, step: int) -> None:
        met = bool(self._due)
        super().merge(step)
        if not met:
            return
        if math.isfinite(self._loss):
            self.clock[TOTAL] += self._loss
            self.clock[COUNT] += 1
        if math.isnan(self.clock[FIRST]):
            self.clock[FIRST] = self._loss
        period = int(self.clock[PERIOD])
        if (step + 1) // self.every > (step + 1 - period) // self.every and self.clock[COUNT]:
            mean = float(self.clock[TOTAL] / self.clock[COUNT])
            period = shorter(period, self.h, mean, float(self.clock[FIRST]), self.gamma)
            self.clock[TOTAL] = self.clock[COUNT] = 0.0
            self._chosen = period
        self.clock[PERIOD], self.clock[NEXT] = period, step + period

    @property
    def alike(self) -> Sequence[Tensor]:
        return (self.clock,)

    def state(self) -> Mapping[str, Tensor]:
        return {**super().state(), "adaptive": self.clock}

    def metrics(self) -> Mapping[str, Any]:
        chosen, self._chosen = self._chosen, None
        return {**super().metrics(), **({} if chosen is None else {"period": chosen})}
