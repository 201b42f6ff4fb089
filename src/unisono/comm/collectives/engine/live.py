"""The backend's own collectives."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from unisono.comm.collectives import Algorithm, Done, Pending
from unisono.comm.device import is_apart


class EngineAlgorithm(Algorithm):
    """Every operation as torch's process group does it."""

    def all_reduce(self, x: Tensor, op: Any) -> Pending:
        return dist.all_reduce(x, op=op, group=self.pg, async_op=True) or Done()

    def all_gather(self, out: Tensor, part: Tensor, later: bool = False) -> Pending:
        return dist.all_gather_single(out, part, group=self.pg, async_op=True) or Done()

    def exchange(self, out: Tensor, x: Tensor) -> Pending:
        return dist.all_to_all_single(out, x, group=self.pg, async_op=True) or Done()

    def reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        # Gloo's own reduce-scatter sends what an all-reduce sends; an exchange of parts sends half of that.
        if is_apart(x):
            dist.reduce_scatter_single(out, x, group=self.pg)
        else:
            super().reduce_scatter(out, x)
