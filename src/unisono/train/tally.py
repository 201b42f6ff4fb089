"""The few numbers of a step that travel with its gradients: its losses, and whether a rank was asked to stop."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Tally:
    """A line of `places` losses and one wish; ranks fill in their own and the lines are added up.

    own: the places of this rank's leaves. With one place all leaves share it, and their losses are added here; with
    a place for each leaf of the global batch nothing is added before the whole line is there, so the sum does not
    depend on who computed which leaf.
    """

    def __init__(self, places: int, own: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.line = torch.zeros(places + 1, dtype=dtype, device=device)
        self.own = torch.tensor(own, device=device)
        self._one, self._wish, self._wished = self.line[:1], self.line[-1:], False

    def put(self, losses: Tensor) -> None:
        """This rank's losses, one a leaf."""
        if len(self.line) == 2:
            self._one.copy_(losses if len(losses) == 1 else losses.sum())
        else:
            self.line[self.own] = losses

    def wish(self, stop: bool) -> None:
        """Whether this rank was asked to stop."""
        if stop is not self._wished:
            self._wish.fill_(stop)
            self._wished = stop
