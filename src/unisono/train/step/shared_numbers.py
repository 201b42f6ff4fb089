"""What replicas tell each other of a step beside gradients, where each has weights of its own.

Under lock-step the loss, a request to stop and what is not a number cross `dp` beside the gradients (`numbers.Line`).
Where replicas have weights of their own, nothing crosses in most steps; what happened in them is said at the next
meeting: then a run stops, or is found to be bad.
"""

import math
from dataclasses import dataclass, replace

import torch

from unisono.sync import Sync
from unisono.train.step.numbers import Numbers


@dataclass(slots=True)
class SharedNumbers:
    """What one rank has to say at the next meeting. stop: a rank of this replica was asked to. spoiled: a step since
    the last meeting was not one of numbers, and was left out here."""

    sync: Sync
    device: torch.device
    stop: bool = False
    spoiled: bool = False

    def share(self, step: int, numbers: Numbers) -> Numbers:
        """The numbers of step `step` of this replica → those on which all replicas act. Every rank calls it, or it
        hangs where replicas meet."""
        replicas = self.sync.replicas
        if replicas is None:
            return numbers
        self.stop |= numbers.stop
        if not self.sync.meets(step):
            self.spoiled |= not (math.isfinite(numbers.norm) and math.isfinite(numbers.loss))
            return replace(numbers, stop=False, met=False)
        said = [[numbers.loss, math.nan if self.spoiled else numbers.norm, float(self.stop)]]
        table = replicas.all_gather(torch.tensor(said, dtype=torch.float64, device=self.device))
        losses, norms, stops = table.T.tolist()
        largest = math.nan if any(map(math.isnan, norms)) else max(norms)
        self.stop = self.spoiled = False
        loss = math.fsum(losses) / len(losses)
        self.sync.take_loss(step, loss)
        return replace(numbers, loss=loss, stop=any(stops), largest=largest)
