"""Policies of a user's that keep something between steps."""

import torch

from unisono.spec.fidelity import Fidelity
from unisono.spec.work import Work
from unisono.sync import Policy
from unisono.sync.every_step import EveryStepSync


class Sums(EveryStepSync):
    """Keeps the sum of all gradients so far, and how many steps there were."""

    def __init__(self, slots, group):
        super().__init__(group)
        self.slots = [slot for slot in slots if not slot.alias]
        self.sums = {f"{s.name}/sum": torch.zeros_like(s.master) for s in self.slots}
        self.steps = torch.zeros(1, dtype=torch.int64)
        self.loaded = []

    def after_update(self, step):
        self.steps += 1
        for slot in self.slots:
            self.sums[f"{slot.name}/sum"] += slot.master.detach()

    def state(self):
        return self.sums | {"steps": self.steps}

    def load(self, state):
        self.loaded = sorted(state)


class Own(Sums):
    """Each replica its own."""

    def __init__(self, slots, group):
        super().__init__(slots, group)
        self.private = True

    def after_update(self, step):
        super().after_update(step)
        self.steps += 10 * self.dp.index


class Keeping(Policy):
    """Sums, and remembers."""

    name = "keeping"
    fidelity = Fidelity.ROUNDING
    alone = True

    def work(self, gradient_bytes, dp):
        return Work(kept=gradient_bytes)

    def bind(self, slots, group, codec):
        return Sums(slots, group)


class Apart(Keeping):
    """Sums, and each replica remembers something of its own."""

    name = "apart"

    def bind(self, slots, group, codec):
        return Own(slots, group)
