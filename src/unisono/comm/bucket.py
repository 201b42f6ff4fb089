"""Flat buckets of gradients: views into one buffer that depart whole.

The order of departure is that of the parameter list, last parameter first, which is about the order in which
backward finishes; it never depends on arrival, so all ranks issue the same collectives in the same order
(Li et al., PyTorch Distributed, 2020).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unisono.comm.device import is_apart
from unisono.comm.group import Group

FIRST_BYTES = 1 << 20
CAP_BYTES = 25 << 20
AT_ONCE = 1 << 62  # as few buckets as there are dtypes
EVERYTHING = slice(None)
WARM_BYTES = 256 << 10  # gradients that are copied together while they are in the CPU's second cache


class Bucket:
    """Gradients that travel together in `flat`, whose length is a multiple of `multiple`, so that it can be dealt, and
    which lies where the ranks of `over` can sum it best.

    body: the gradients alone, without what fills `flat` up. waiting: how many are still to come in this backward.
    absent: the parameters that had no gradient when the bucket left; zeros travel for them.
    """

    def __init__(self, params: Sequence[nn.Parameter], multiple: int = 1, over: Group | None = None) -> None:
        self.params = tuple(params)
        numel = sum(p.numel() for p in params)
        like, length = params[0], -(-numel // multiple) * multiple
        if over is None:
            self.flat = torch.zeros(length, dtype=like.dtype, device=like.device)
        else:
            self.flat = over.buffer(length, like)
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
        self.absent = [p for p in self.params if p.grad is None]
        if self.absent:
            for p, view in zip(self.params, self.views, strict=True):
                if p.grad is None:
                    p.grad = view.zero_()


def deal(params: Sequence[nn.Parameter], cap_bytes: int = CAP_BYTES) -> list[list[nn.Parameter]]:
    """Parameters in reverse order, cut into runs of one dtype of at most `cap_bytes`; the first run is small so
    that it leaves early."""
    runs: list[list[nn.Parameter]] = []
    room = 0
    for p in reversed(params):
        if not runs or p.nbytes > room or p.dtype != runs[-1][0].dtype:
            room = cap_bytes if runs or cap_bytes == AT_ONCE else min(FIRST_BYTES, cap_bytes)
            runs.append([])
        runs[-1].append(p)
        room -= p.nbytes
    return runs


def pieces(params: Sequence[nn.Parameter]) -> list[slice]:
    """Runs of `params` of about `WARM_BYTES` each on a CPU; a GPU keeps none warm, and takes them all at once."""
    if params and is_apart(params[0]):
        return [slice(0, len(params))]
    parts: list[slice] = []
    begun, nbytes = 0, 0
    for i, p in enumerate(params):
        nbytes += p.nbytes
        if nbytes >= WARM_BYTES or i == len(params) - 1:
            parts.append(slice(begun, i + 1))
            begun, nbytes = i + 1, 0
    return parts
