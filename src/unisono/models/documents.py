"""Several documents in one window: who may see whom, and where each begins.

Shapes: B batch, T positions of the whole window, t queries, s keys.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Documents:
    """Which document each position of a window belongs to. Every rank has the whole windows of its micro-batch.

    ids: int64 [B, T], another number than the neighbour's where a document begins. positions: int64 [B, T], counted
    from the beginning of each document.
    """

    ids: Tensor
    positions: Tensor

    @classmethod
    def of(cls, ids: Tensor) -> Self:
        """From the numbers alone."""
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        begins = torch.ones_like(ids, dtype=torch.bool)
        begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
        return cls(ids, places - (places * begins).cummax(1).values)

    def apart(self, queries: Tensor | slice, keys: Tensor | slice) -> Tensor:
        """bool [B, 1, t, s]: True where query and key are of two documents. queries, keys: which positions."""
        return (self.ids[:, queries, None] != self.ids[:, None, keys]).unsqueeze(1)

    def samples(self, first: int, count: int) -> Self:
        """Those of some samples."""
        return type(self)(self.ids.narrow(0, first, count), self.positions.narrow(0, first, count))
