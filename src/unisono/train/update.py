"""The update: from a final gradient to new weights, and whether there is one at all."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from unisono.parallel.params import Slot
from unisono.sync import Verdict
from unisono.train.clip import clip, excess
from unisono.train.numbers import Numbers
from unisono.train.optim._make import set_rate


@dataclass(frozen=True, slots=True)
class Report:
    """What one step did. loss: nats per target over the global batch. norm: before clipping. verdict: DISCARD where
    nothing was changed. finite: whether loss and norm are numbers; if not, the run cannot go on."""

    step: int
    loss: float
    norm: float
    lr: float
    verdict: Verdict
    stop: bool = False
    finite: bool = True


@dataclass(slots=True)
class Update:
    """Learning rate, clipping and the optimiser of one rank.

    rate(step): the learning rate of a step. max_norm: what the gradient of the whole model is clipped to; 0: off.
    """

    optimizer: Optimizer
    slots: Sequence[Slot]
    rate: Callable[[int], float]
    max_norm: float

    def __call__(self, step: int, verdict: Verdict, numbers: Numbers) -> Report:
        """Make the update of step `step`, if its gradient is to be applied here and is one of numbers."""
        lr = self.rate(step)
        finite = math.isfinite(numbers.loss) and math.isfinite(numbers.norm)
        if not finite:
            verdict = Verdict.DISCARD
        if verdict is Verdict.APPLY:
            set_rate(self.optimizer, lr)
            clip_and_step(self.optimizer, self.slots, numbers.norm, self.max_norm)
        return Report(step, numbers.loss, numbers.norm, lr, verdict, numbers.stop, finite)


def clip_and_step(optimizer: Optimizer, slots: Sequence[Slot], norm: float, limit: float) -> None:
    """As `clip` and then the optimiser's step, to the last bit; a fused optimiser divides while it has the gradients in
    its registers, and they need not be gone through twice. Either way the gradients are clipped afterwards."""
    grads = [s.master.grad for s in slots if s.master.grad is not None]
    fused = optimizer.defaults.get("fused") and all(g.dtype == torch.float32 for g in grads)
    if not limit or norm <= limit or not fused or not grads:
        clip(slots, norm, limit)
        optimizer.step()
        return
    optimizer.grad_scale = torch.tensor(excess(norm, limit), device=grads[0].device)  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale  # type: ignore[attr-defined]
