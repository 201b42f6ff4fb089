"""Rows to other ranks, to each as many as it needs: an all-to-all of uneven parts."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from unisono.comm.group import Group


def exchange_rows(x: Tensor, to: Sequence[int], come: Sequence[int], group: Group) -> Tensor:
    """x [sum(to), ...], to[i] rows for member i in turn → [sum(come), ...], come[i] rows of member i in turn.

    Every member calls it, or it hangs.
    """
    if group.pg is None:
        return x
    x = x.contiguous()
    out = x.new_empty((sum(come), *x.shape[1:]))
    nbytes = (x.shape[0] - to[group.index]) * x.element_size() * (x[:1].numel() or 1 if len(x) else 0)
    group.recorder.count(group.axis, "all_to_all", nbytes)
    with group.recorder.span("comm", axis=group.axis, op="all_to_all", exposed=True, bytes=nbytes):
        dist.all_to_all_single(out, x, list(come), list(to), group=group.pg)
    return out
