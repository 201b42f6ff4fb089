"""Norms of whole parameters for an optimiser's step, where ranks of a replica hold parts of them.

Parts are measured and added up as the gradient's norm is: a vector of one number a parameter (or a row, under
`sync=canonical`), in the model's order, in which each box counts once whatever axes cut the tensor. All columns of a
pass meet in one all-reduce.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.parallel.params import Slot
from unisono.train.step.grad_norm import ByTensor
from unisono_contrib.train.optim._normed_steps import Norms


class WholeNorms(Norms):
    """Norms over the ranks of a replica. by: how the run measures its gradient. slots: by the parameter that the
    optimiser steps. owners: alias → the name of the parameter that it is another use of."""

    def __init__(
        self,
        columns: int,
        by: ByTensor,
        slots: Mapping[Tensor, Slot],
        owners: Mapping[str, str],
        device: torch.device,
    ) -> None:
        super().__init__(columns)
        self.by, self.slots, self.device = by, slots, device
        places = {name: i for i, name in enumerate(by.at)}
        self.places = {p: places[owners.get(slot.name, slot.name)] for p, slot in slots.items()}
        self.empty = torch.zeros(by.length, dtype=torch.float64, device=device)
        self.none = torch.zeros(len(places), dtype=torch.float64, device=device)
        self._lines: dict[int, Tensor] = {}
        self._numbers: dict[int, list[float]] = {}

    def measure(self, column: int, params: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        parts = [(self.slots[p], x) for p, x in zip(params, tensors, strict=True)]
        self._lines[column] = self._lines.get(column, self.empty) + self.by.squares(parts, self.device)

    def measure_largest(self, column: int, params: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        line = self._lines.setdefault(column, self.none.clone())
        for p, x in zip(params, tensors, strict=True):
            if x.numel():
                line[self.places[p]] = x.max()

    def meet(self, sums: Sequence[int], largest: Sequence[int] = ()) -> None:
        """As of `Norms`; ranks that hold nothing of what was measured bring zeros."""
        squares = torch.cat([self._lines.pop(column, self.empty) for column in sums])
        for column, line in zip(sums, self.by.replica.all_reduce(squares).chunk(len(sums)), strict=True):
            self._numbers[column] = self.by.by_parameter(line)
        if largest:
            most = torch.cat([self._lines.pop(column, self.none) for column in largest])
            most = self.by.replica.all_reduce(most, dist.ReduceOp.MAX).tolist()
            for i, column in enumerate(largest):
                self._numbers[column] = most[i * len(self.none) : (i + 1) * len(self.none)]

    def of(self, params: Sequence[Tensor]) -> list[list[float]]:
        known = range(self.columns)
        return [
            [self._numbers[c][self.places[p]] if c in self._numbers else 0.0 for c in known] for p in params
        ]
