"""The few numbers of a step that travel beside its gradients: its losses, whether a rank was asked to stop, and whether
a rank lacks a gradient. No codec sees them, and every rank gets them, under every policy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unisono.comm.group import Group, Pending
from unisono.sync import Verdict


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers of one step. norm: of the whole model's gradient, before clipping. loss: nats per target over the global
    batch. stop: whether any rank was asked to. squares: the sum over all ranks of what each had `Gradients` carry; None
    where it carries nothing.

    Where replicas have weights of their own: met: whether they met in this step. If not, loss is this replica's, and
    the step is not judged. largest: of the replicas' norms, where they differ."""

    norm: float
    loss: float
    stop: bool
    met: bool = True
    largest: float | None = None
    squares: float | None = None

    @property
    def alike(self) -> "Numbers":
        """These numbers as all ranks have them."""
        return self if self.largest is None else replace(self, norm=self.largest)


def not_numbers(step: int, verdict: Verdict, numbers: Numbers) -> str:
    """What of a step is not a number, in words; "" where all is. The norm of a step whose gradients are still on their
    way is not known, but for an infinite one."""
    known = math.isfinite(numbers.norm) or (verdict is Verdict.REMOTE and not math.isinf(numbers.norm))
    if not math.isfinite(numbers.loss):
        return f"the loss is {numbers.loss}"
    return "" if known else f"the gradient norm is {numbers.norm}"


@dataclass(frozen=True, slots=True)
class LossPlaces:
    """The places of this rank's losses in a `Line`.

    count: 1 if each rank adds up the losses of its leaves. Else the number of leaves in the global batch: each leaf has
    a place of its own, so the total does not depend on which rank computed which leaf.
    here: the places of this rank's leaves, in order.
    counted: False where another rank of the replica has the same losses.
    """

    count: int = 1
    here: Sequence[int] = (0,)
    counted: bool = True


class Line:
    """float64 [places + 2]: the losses, then how many ranks were asked to stop, then how many lack a gradient. They are
    this rank's numbers first, and those of all replicas together after `receive`. more: numbers after the losses."""

    def __init__(self, places: LossPlaces, dp: Group, device: torch.device, more: int = 0) -> None:
        self.dp, self._more = dp, more
        self._size(places, device)

    def _size(self, places: LossPlaces, device: torch.device) -> None:
        self.places, more, dp = places, self._more, self.dp
        self.values = torch.zeros(places.count + more + 2, dtype=torch.float64, device=device)
        self._all = self.values.new_zeros(dp.size * len(self.values))
        self._here = torch.tensor(places.here, device=device)

    def place(self, places: LossPlaces) -> None:
        """This rank's losses have these places from now on."""
        if places.count + self._more + 2 > len(self.values):
            self._size(places, self.values.device)
        self.places, self._here = places, torch.tensor(places.here, device=self.values.device)

    def write(self, losses: Tensor | None, stop: bool, lacks: bool) -> None:
        """This rank's numbers. losses: of its leaves, in order; zeros where the loss is not computed."""
        line = self.values.zero_()
        if losses is not None and self.places.counted:
            if self.places.count == 1:
                line[:1].copy_(losses if len(losses) == 1 else losses.sum())
            else:
                line[self._here] = losses.to(line.dtype)
        if stop:
            line[-2].fill_(1.0)
        if lacks:
            line[-1].fill_(1.0)

    def send(self) -> Pending:
        """Send it to all replicas and return at once. Every member of `dp` calls it, or it hangs."""
        return self.dp.start_all_gather(self._all, self.values)

    def receive(self, pending: Pending) -> None:
        """Wait for all replicas, and add up."""
        pending.wait()
        torch.sum(self._all.view(self.dp.size, -1), 0, out=self.values)
