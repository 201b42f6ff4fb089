"""The backend's own collectives."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from unisono.comm.collectives import Algorithm, Done, Pending
from unisono.comm.device import is_apart
from unisono.programs.collectives import ROOTED


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

    @property
    def rooted(self) -> Algorithm:
        return self

    def broadcast(self, x: Tensor, root: int) -> Pending:
        return dist.broadcast(x, group=self.pg, group_src=root, async_op=True) or Done()

    def reduce(self, x: Tensor, root: int, op: Any) -> Pending:
        return dist.reduce(x, op=op, group=self.pg, group_dst=root, async_op=True) or Done()

    def scatter(self, out: Tensor, x: Tensor | None, root: int) -> Pending:
        parts = None if x is None else list(x.chunk(self.pg.size()))
        return dist.scatter(out, parts, group=self.pg, group_src=root, async_op=True) or Done()

    def gather(self, out: Tensor | None, part: Tensor, root: int) -> Pending:
        parts = None if out is None else list(out.chunk(self.pg.size()))
        return dist.gather(part, parts, group=self.pg, group_dst=root, async_op=True) or Done()

    def sends(self, op: str, x: Tensor, root: int = 0) -> int:
        if op not in ROOTED:
            return super().sends(op, x, root)
        size, is_root = self.pg.size(), self.pg.rank() == root
        shares = {"broadcast": (x.nbytes, 0), "reduce": (0, x.nbytes), "gather": (0, x.nbytes)}
        return shares.get(op, (x.nbytes * (size - 1) // size, 0))[0 if is_root else 1]
