"""The scale of the loss under fp16 (Micikevicius et al., Mixed precision training, 2018).

Gradients below 6e-8 are zero in fp16, so the loss is multiplied by a scale before backward and gradients are divided by
it after. A scale that is too large makes them overflow. Then nothing is updated, the scale is halved, and the same step
is played again: same samples, same randomness. After `window` steps in a row without an overflow it is doubled.

Scales are powers of two, so scaling rounds nothing: a run that overflowed on its way has the weights of one that began
with the smaller scale. What decides is the loss and the gradient norm, which all ranks have alike, and an infinity is
still one after any sum: so all of them decide the same.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.parallel.params import Slot, values_of
from unisono.plan.options import Arithmetic

LEAST, MOST = 1.0, 2.0**24


class Unscaled:
    """Losses as they are: the value that stands for every precision but fp16. A number that is not finite ends the
    run. factor: what backward begins with, None for one."""

    factor: Tensor | None = None

    def unscale(self, slots: Sequence[Slot]) -> None:
        """Take the scale out of this rank's gradients."""

    def overflowed(self, finite: bool) -> bool:
        """Description whether a step came to finite numbers: whether it is to be played again."""
        return False

    def take_back(self) -> None:
        """No scale helps this step, which is given up: those that were tried on it leave no trace."""
        return None

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, as tensors that it may fill."""
        return {}

    def says(self) -> dict[str, float]:
        """For metrics, by name."""
        return {}


class DynamicScale(Unscaled):
    """A scale that finds its own size.

    scale: float32 []. calm: int64 [], steps since it last changed. overflows: int64 [], of the whole run.
    """

    def __init__(self, how: Arithmetic, device: torch.device) -> None:
        self.scale = self.factor = torch.tensor(float(how.scale), dtype=torch.float32, device=device)
        self.calm, self.overflows = torch.zeros(2, dtype=torch.int64, device=device).unbind()
        self.window = how.window
        self._before: tuple[float, int] | None = (
            None  # scale and calm when the step was tried for the first time
        )

    @torch.no_grad()
    def unscale(self, slots: Sequence[Slot]) -> None:
        grads = [values_of(slot.master.grad) for slot in slots if slot.master.grad is not None]
        dense = [grad for grad in grads if not grad.is_sparse]
        if dense:
            torch._foreach_mul_(dense, (1.0 / self.scale).to(dense[0].dtype))
        for rows in (grad for grad in grads if grad.is_sparse):
            rows.mul_(1.0 / float(self.scale))

    def overflowed(self, finite: bool) -> bool:
        scale = float(self.scale)
        if finite:
            self._before = None
            self.calm += 1
            if int(self.calm) >= self.window:
                self.scale.fill_(min(2.0 * scale, MOST))
                self.calm.zero_()
            return False
        self._before = self._before or (scale, int(self.calm))
        self.overflows += 1
        self.calm.zero_()
        self.scale.fill_(max(0.5 * scale, LEAST))
        return scale > LEAST

    def take_back(self) -> None:
        if self._before is not None:
            scale, calm = self._before
            self.scale.fill_(scale)
            self.calm.fill_(calm)
        self._before = None

    def state(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "calm": self.calm, "overflows": self.overflows}

    def says(self) -> dict[str, float]:
        return {"loss_scale": float(self.scale), "overflows": int(self.overflows)}


def scaler_of(precision: str, how: Arithmetic, device: torch.device) -> Unscaled:
    """That of a plan's precision."""
    return DynamicScale(how, device) if precision == "fp16" else Unscaled()
