"""Flat buckets of gradients: views into one buffer that depart whole."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unisono.comm.group import Group

EVERYTHING = slice(None)
FIRST_BYTES = 1 << 20
CAP_BYTES = 25 << 20
AT_ONCE = 1 << 62  # as few buckets as there are dtypes


class Bucket:
    """Gradients that travel together in `flat`, whose length is a multiple of `multiple`, so that it can be dealt, and
    which lies where the ranks of `over` can sum it best.

    body: the gradients alone, without what fills `flat` up. waiting: how many are still to come in this backward.
    absent: the parameters that had no gradient when the bucket left; zeros travel for them.
    """

    def __init__(self, params: Sequence[nn.Parameter], multiple: int = 1, over: Group | None = None) -> None:
        self.params = tuple(params)
        numel = sum(p.numel() for p in params)
        like = params[0].new_empty(0, dtype=params[0].grad_dtype)
        length = -(-numel // multiple) * multiple
        self.flat = like.new_zeros(length) if over is None else over.buffer(length, like)
        self.views: list[Tensor] = []
        offset = 0
        for p in params:
            self.views.append(self.flat[offset : offset + p.numel()].view(p.shape))
            offset += p.numel()
        self.body = self.flat[:numel]
        self.waiting = 0
        self.absent: list[nn.Parameter] = []

    def gather(self, part: slice = EVERYTHING) -> None:
        """Move every gradient of `part` that there is, and that is not yet a view, into the buffer: all in one call,
        since one call for each from a hook costs more than the copies of a small model."""
        views: list[Tensor] = []
        grads: list[Tensor] = []
        for p, view in zip(self.params[part], self.views[part], strict=True):
            if p.grad is not None and p.grad is not view:
                views.append(view)
                grads.append(p.grad)
                p.grad = view
        if views:
            with torch.no_grad():  # or a backward that keeps its graph would tie it to the buffer
                torch._foreach_copy_(views, grads)

    def fill(self) -> None:
        """As `gather`, and let those that there are not be zero."""
        self.gather()
        lacking = [(p, view) for p, view in zip(self.params, self.views, strict=True) if p.grad is None]
        self.absent = [p for p, _ in lacking]
        for p, view in lacking:
            p.grad = view.zero_()


def deal(params: Sequence[nn.Parameter], cap_bytes: int = CAP_BYTES) -> list[list[nn.Parameter]]:
    """Parameters in reverse order, cut into runs of one dtype whose gradients are at most `cap_bytes`; the first run is
    small so that it leaves early."""
    runs: list[list[nn.Parameter]] = []
    room = 0
    for p in reversed(params):
        if not runs or nbytes_of(p) > room or p.grad_dtype != runs[-1][0].grad_dtype:
            room = cap_bytes if runs or cap_bytes == AT_ONCE else min(FIRST_BYTES, cap_bytes)
            runs.append([])
        runs[-1].append(p)
        room -= nbytes_of(p)
    return runs


def nbytes_of(p: nn.Parameter) -> int:
    """Bytes of its gradient, which is wider than a parameter without a master."""
    dtype = p.grad_dtype or p.dtype
    return p.numel() * dtype.itemsize
