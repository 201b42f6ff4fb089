"""Operations of a group that end or begin with one of its ranks, beside `Group.broadcast`: reduce, gather, scatter.

Every member of the group calls them, or it hangs. A group of one answers at once.
"""

import torch.distributed as dist
from torch import Tensor

from unisono.comm.group import Group


def reduce(group: Group, x: Tensor, to: int = 0, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce x into that of the rank at index `to`, in place; those of others are used up. Returns x."""
    if group.algorithm is not None:
        by = group.algorithm.pick("reduce", x)
        with group._timed("reduce", by.sends("reduce", x, to), by):
            by.reduce(x, to, op).wait()
    return x


def gather(group: Group, x: Tensor, to: int = 0) -> Tensor | None:
    """x [n, ...] → [size · n, ...] on the rank at index `to`, the parts one after the other; None on others."""
    if group.algorithm is None:
        return x
    x, by = x.contiguous(), group.algorithm.pick("gather", x)
    out = x.new_empty((group.size * x.shape[0], *x.shape[1:])) if group.index == to else None
    with group._timed("gather", by.sends("gather", x, to), by):
        by.gather(out, x, to).wait()
    return out


def scatter(group: Group, out: Tensor, x: Tensor | None, source: int = 0) -> Tensor:
    """Part i of x [size · n, ...] of the rank at index `source` into out [n, ...] of the rank at index i; others have
    no x. Returns out."""
    if group.algorithm is None:
        return out if x is None else out.copy_(x)
    by, whole = group.algorithm.pick("scatter", out), out.expand(group.size, *out.shape)
    with group._timed("scatter", by.sends("scatter", whole, source), by):
        by.scatter(out, x, source).wait()
    return out
