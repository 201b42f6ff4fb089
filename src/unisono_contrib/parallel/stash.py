"""Versions of a stage's weights: a backward uses those that its forward used (PipeDream; Narayanan et al., 2019)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from unisono.parallel.params import Slot


class Stash:
    """The weights of one stage, several versions of them while micro-batches are in flight.

    The optimiser steps masters in place. What is computed with is a copy by version: the live parameters are pointed at
    it before each forward and backward, so that what autograd has kept of a forward is what it was. updates: made so
    far. crosses: whether an update may come between a forward and its backward; else the masters are used themselves.
    lag: of how many updates before the last one weights are still asked for.
    """

    def __init__(self, slots: Sequence[Slot], crosses: bool, lag: int) -> None:
        self.slots, self.crosses, self.lag = slots, crosses or lag > 0, lag
        self.updates = 0
        self.held: dict[int, list[Tensor]] = {}
        self.users: Counter[int] = Counter()
        self.used: dict[int, int] = {}  # micro-batch in flight -> its version

    def forward(self, micro: int, version: int) -> None:
        """Before a forward that uses this version."""
        self.users[version] += 1
        self.used[micro] = version
        self._point(version)

    def backward(self, micro: int) -> int:
        """Before a backward; returns the version, that of the micro-batch's forward."""
        version = self.used.pop(micro)
        self._point(version)
        self.users[version] -= 1
        return version

    def before_update(self) -> None:
        """Keep what is asked for later, and let go of what is not."""
        if self.lag:
            self._keep(self.updates)
        self.updates += 1
        for version in [v for v in self.held if not self.users[v] and v < self.updates - self.lag]:
            del self.held[version]

    def rest(self) -> None:
        """Nothing is in flight: the live parameters are the masters again, and versions are counted from here."""
        self.updates, self.held, self.used = 0, {}, {}
        self.users.clear()
        for slot in self.slots:
            slot.live.data = slot.master.data

    @torch.no_grad()
    def _keep(self, version: int) -> None:
        if version not in self.held:
            if version != self.updates:
                raise RuntimeError(
                    f"version {version} of the weights is asked for and gone; now is {self.updates}"
                )
            self.held[version] = [slot.master.detach().clone() for slot in self.slots]

    def _point(self, version: int) -> None:
        if not self.crosses:
            if version != self.updates:
                raise RuntimeError(
                    f"version {version} of the weights is asked for, and {self.updates} is there"
                )
            return
        self._keep(version)
        for slot, tensor in zip(self.slots, self.held[version], strict=True):
            slot.live.data = tensor


def set_apart(slots: Sequence[Slot]) -> list[Slot]:
    """The slots with masters of their own, of the same storage until something is stashed."""
    return [
        replace(slot, master=torch.nn.Parameter(slot.live.data, requires_grad=slot.live.requires_grad))
        for slot in slots
    ]
