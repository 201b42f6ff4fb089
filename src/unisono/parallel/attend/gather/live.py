"""Keys and values of all ranks at once, in one collective a pass."""

import torch
from torch import Tensor

from unisono.comm.group import Group
from unisono.parallel.online import GradOf, See


class Gathered:
    """Shows every rank's keys and values to every rank: all are there, and none is kept."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def show(self, part: Tensor, see: See) -> None:
        """see(rank, keys and values) for each rank of the group, in their order."""
        for rank, theirs in enumerate(self._all(part)):
            see(rank, theirs)

    def collect(self, part: Tensor, grad_of: GradOf) -> Tensor:
        """The sum over all ranks of grad_of(this rank, its keys and values)."""
        grads = [grad_of(rank, theirs) for rank, theirs in enumerate(self._all(part))]
        return self.group.reduce_scatter(torch.stack(grads)).squeeze(0)

    def _all(self, part: Tensor) -> Tensor:
        return self.group.all_gather(part.unsqueeze(0))
