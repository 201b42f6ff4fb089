"""Do replicas hold the same weights? A few words of the weights are summed up on each rank, and the sums travel with
the gradients, so that a look costs no message.

Whatever lets ranks part, such as gradients of their own, reaches nearly all weights within a step. So a few at a time
are enough, others at each look.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.comm.group import Group
from unisono.parallel.params import Slot, local_of
from unisono.spec.errors import UserCodeError
from unisono.spec.words import listed
from unisono.train.watch.copies import checksum

PERIOD = 8  # backwards between two looks, after the first ones
FIRST = 16
WORDS = 1024  # numbers of a weight that a look takes
WEIGHTS = 4  # of which a look takes some
SHORT = 0xFFFF  # what is left of a sum: with it, sums of squares over ranks stay exact in float64


class Replicas:
    """The weights of one model, which the ranks of `dp` all hold."""

    def __init__(self, slots: Sequence[Slot], dp: Group) -> None:
        self._slots, self._dp, self._made, self._looks = tuple(slots), dp, 0, 0

    def due(self) -> bool:
        """Whether this backward takes a look; it is counted."""
        self._made += 1
        return self._made <= FIRST or self._made % PERIOD == 0

    @torch.no_grad()
    def words(self) -> Tensor:
        """float64 [2]: a sum over some weights, and its square."""
        sums = [checksum(part) for _, part in self._parts()]
        short = (torch.stack(sums).sum() & SHORT).to(torch.float64)
        return torch.stack([short, short * short])

    def _parts(self) -> list[tuple[Slot, Tensor]]:
        count = len(self._slots)
        places = [(self._looks * WEIGHTS + i) % count for i in range(min(WEIGHTS, count))]
        return [(self._slots[place], self._part(self._slots[place])) for place in places]

    def _part(self, slot: Slot) -> Tensor:
        flat = local_of(slot.live.detach()).reshape(-1)
        windows = max(1, -(-flat.numel() // WORDS))
        return flat[self._looks % windows * WORDS :][:WORDS]

    def judge(self, total: Sequence[float]) -> None:
        """total: what the words of all ranks add up to; equal numbers have the least sum of squares for their sum.

        Every rank calls it after the same look. Raises UserCodeError J28 if replicas differ by more than rounding."""
        one, square = total
        looked, self._looks = self._parts(), self._looks + 1
        if square * self._dp.size != one * one:
            for slot, own in looked:
                self._compare(slot, own)

    @torch.no_grad()
    def _compare(self, slot: Slot, own: Tensor) -> None:
        if not own.numel():
            return
        rows = self._dp.all_gather(own.reshape(1, -1).contiguous()).view(self._dp.size, -1)
        wide = rows.double() if not rows.is_complex() else torch.view_as_real(rows).double()
        apart = (wide - wide[:1]).abs().flatten(1).amax(1)
        near = float(wide.abs().max()) * torch.finfo(rows.dtype).eps ** 0.5
        odd = [rank for rank, far in enumerate(apart.tolist()) if not far <= near]
        if odd:
            ranks = [self._dp.ranks[rank] for rank in odd]
            raise UserCodeError(
                f"replicas have parted: {slot.name} of {listed(ranks)} differs from rank {self._dp.ranks[0]}'s by up to"
                f" {max(apart.tolist()):.1e}",
                where="backward",
                likely="each rank made an update of its own: a rate, a choice or noise that follows its samples",
                fix="job.mean, job.ranks: one number for all ranks; unisono prove names the step and the gradient",
                code="J28",
            )
