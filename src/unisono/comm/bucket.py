"""Flat buckets of gradients: views into one buffer that depart whole.

The order of departure is that of the parameter list, last parameter first, which is about the order in which
backward finishes; it never depends on arrival, so all ranks issue the same collectives in the same order
(Li et al., PyTorch Distributed, 2020).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unisono.comm.group import Group

FIRST_BYTES = 1 << 20
CAP_BYTES = 25 << 20
AT_ONCE = 1 << 62  # as few buckets as there are dtypes
EVERYTHING = slice(None)
WARM_BYTES = 256 << 10  # gradients that are copied together while they are in the processor's second cache


class Bucket:
    """Gradients that travel together in `flat`; `tail` is room at its end for a few numbers of the step itself (its
    loss), which so need no collective of their own. `body` is the gradients alone. `flat` is as long as some
    multiple of `multiple`, so that it can be dealt, and lies where the ranks of `over` can sum it best."""

    def __init__(
        self, params: Sequence[nn.Parameter], tail: int = 0, multiple: int = 1, over: Group | None = None
    ) -> None:
        self.params = tuple(params)
        numel = sum(p.numel() for p in params)
        like = params[0]
        length = -(-(numel + tail) // multiple) * multiple
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
        self.tail = self.flat[numel : numel + tail] if tail else None
        self.waiting = len(self.params)

    def gather(self, part: slice = EVERYTHING, absent_too: bool = False) -> None:
        """Move every gradient of `part` that there is, and that is not yet a view, into the buffer: all in one call,
        since one call for each from a hook costs more than the copies of a small model. absent_too: and let those that
        there are not be zero."""
        views: list[Tensor] = []
        grads: list[Tensor] = []
        for p, view in zip(self.params[part], self.views[part], strict=True):
            grad = p.grad
            if grad is view:
                continue
            if grad is not None:
                views.append(view)
                grads.append(grad)
            elif absent_too:
                view.zero_()
            else:
                continue
            p.grad = view
        if views:
            with torch.no_grad():  # or a backward that keeps its graph would tie it to the buffer
                torch._foreach_copy_(views, grads)

    def fill(self) -> None:
        """As `gather`, and absent gradients count as zero."""
        self.gather(absent_too=True)


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
    """Runs of `params` of about `WARM_BYTES` each on a processor; a GPU keeps none warm, and takes them all at once."""
    if params and params[0].is_cuda:
        return [slice(0, len(params))]
    found: list[slice] = []
    begun, nbytes = 0, 0
    for i, p in enumerate(params):
        nbytes += p.nbytes
        if nbytes >= WARM_BYTES or i == len(params) - 1:
            found.append(slice(begun, i + 1))
            begun, nbytes = i + 1, 0
    return found


class Buckets:
    """All gradients of one rank on their way out.

    early: filled by backward's own hooks and handed over while backward goes on. late: groups of parameters whose
    gradients need something done inside the replica first; the caller fills and hands those over. The last run of
    early parameters is there only when backward ends anyway, so it joins the last late group where both fit into one
    bucket: one collective less.
    on_ready(bucket) is called for each early bucket exactly once a step, in the fixed order. over: the ranks over which
    whole buckets are summed; a collective of them.
    """

    def __init__(
        self,
        early: Sequence[nn.Parameter],
        late: Sequence[Sequence[nn.Parameter]] = (),
        tail: int = 0,
        multiple: int = 1,
        over: Group | None = None,
    ) -> None:
        some = next((p for group in (early, *late) for p in group), None)
        # In memory that all see, a sum is work for the cores that backward needs, and nothing is gained by parts of it.
        near = over is not None and some is not None and over.near(some.device)
        cap_bytes = AT_ONCE if near else CAP_BYTES
        runs = deal(early, cap_bytes)
        late_runs = [deal(group, cap_bytes) for group in late]
        joined: Sequence[nn.Parameter] = ()
        if runs and late_runs and len(late_runs[-1]) == 1:
            both = [*runs[-1], *late_runs[-1][0]]
            if len({p.dtype for p in both}) == 1 and sum(p.nbytes for p in both) <= cap_bytes:
                late_runs[-1] = [both]
                joined = runs.pop()
        spare = [run for group in (runs, *late_runs) for run in group][-1:] if tail else []
        carrier = spare[0] if spare else None

        def made(run: Sequence[nn.Parameter]) -> Bucket:
            return Bucket(run, tail if run is carrier else 0, multiple, over)

        self.early = [made(run) for run in runs]
        self.late = [[made(run) for run in group] for group in late_runs]
        everything = [*self.early, *(bucket for group in self.late for bucket in group)]
        self.tail = everything[-1].tail if everything else None
        self._on_ready: Callable[[Bucket], Any] | None = None
        self._next = 0
        self._final = False
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._hook(bucket, ends.get(i)))
            for bucket in self.early
            for ends in [{part.stop - 1: part for part in pieces(bucket.params)}]
            for i, p in enumerate(bucket.params)
        ]
        for part in pieces(joined):
            bucket = self.late[-1][0]
            last = bucket.params[part.stop - 1]
            self._hooks.append(last.register_post_accumulate_grad_hook(self._warm(bucket, part)))

    def arm(self, on_ready: Callable[[Bucket], Any]) -> None:
        """The backward that follows is this step's last: hand each bucket over as it fills."""
        self._final, self._on_ready, self._next = True, on_ready, 0
        for bucket in self.early:
            bucket.waiting = len(bucket.params)

    def finish(self) -> None:
        """After the last backward: hand over early buckets that never filled (unused parameters), then disarm, and
        begin to count again for the next step, whose first backward may not be its last."""
        for bucket in self.early:
            if bucket.waiting:
                bucket.fill()
                bucket.waiting = 0
        self._depart()
        self._final = False
        for bucket in self.early:
            bucket.waiting = len(bucket.params)

    def _depart(self) -> None:
        while self._next < len(self.early) and self.early[self._next].waiting == 0:
            bucket = self.early[self._next]
            self._next += 1
            if self._on_ready is not None:
                self._on_ready(bucket)

    def _hook(self, bucket: Bucket, part: slice | None) -> Callable[[nn.Parameter], None]:
        """part: that ends with this parameter, if one does; it is moved at once, see `_warm`."""

        def arrived(_: nn.Parameter) -> None:
            bucket.waiting -= 1
            if bucket.waiting == 0:
                self._full(bucket)
            elif part is not None:
                bucket.gather(part)

        return arrived

    def _warm(self, bucket: Bucket, part: slice) -> Callable[[nn.Parameter], None]:
        """For gradients that leave when backward is over: they move into the buffer meanwhile, a few at a time, while
        the processor's cache has them, and since nothing hides the time of copying once it is over."""

        def arrived(_: nn.Parameter) -> None:
            bucket.gather(part)

        return arrived

    def _full(self, bucket: Bucket) -> None:
        """All gradients of a bucket are there. In a backward that is not the step's last they only move into the
        buffer, where the next ones are added to them in place."""
        if self._final:
            bucket.fill()
            self._depart()
        else:
            bucket.gather()
            bucket.waiting = len(bucket.params)

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
