"""The live part of `lag`: who uploads is decided by all alike, from 24 bytes of each rank."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.codecs import Coder
from unisono.comm.bucket import Bucket
from unisono.comm.group import Group
from unisono.sync import Sync, Verdict
from unisono.sync._slots import learning_dense
from unisono.sync.every_step import EveryStepSync
from unisono_contrib.sync._presence import GradientPresence


class LagSync(Sync):
    """State: `NAME/uploaded`, each replica's own, and `NAME/total`, their sum, both like the gradient of NAME; `taken`,
    float64 [window], the squared norms of the gradients of the last updates, the newest first.

    shares: with other replicas what was uploaded is split anew, since its sum is what counts."""

    shares = True

    def __init__(self, slots: Sequence[Any], group: Group, codec: Coder, xi: float, window: int) -> None:
        self.dp, self.xi = group, xi
        self._every_step = EveryStepSync(group, codec, slots)
        self.cap, self.sliced = self._every_step.cap, self._every_step.sliced
        self._slots = trained = learning_dense(slots, "lag")
        self._names = {id(p): slot.name for slot in trained for p in (slot.live, slot.master)}
        like = {slot.name: torch.zeros_like(slot.master, dtype=slot.master.grad_dtype) for slot in trained}
        self.total, self.uploaded = like, {name: torch.zeros_like(x) for name, x in like.items()}
        self.taken = torch.zeros(window, dtype=torch.float64)
        self._world, self._counted = group, frozenset(like)
        self._presence = GradientPresence()
        self._ready: list[Bucket] = []
        self._after: tuple[Tensor, dict[str, Tensor], dict[str, Tensor]] | None = None
        self._uploads = 0

    def among(
        self, world: Group, replica: Group | None = None, counted: frozenset[str] = frozenset()
    ) -> None:
        self._world, self._counted = world, counted
        device = self._slots[0].master.device if self._slots else None
        self._presence = GradientPresence.among(self.total, replica, torch.empty(0, device=device))

    def grad_ready(self, bucket: Bucket) -> None:
        self._ready.append(bucket)

    def lacking(self, absent: Sequence[Any]) -> Sequence[Any]:
        there = self._presence.nonzero(self.total, {self._names[id(p)] for p in absent})
        return [p for p in absent if self._names[id(p)] not in there]

    @torch.no_grad()
    def settle(self) -> Verdict:
        ready, self._ready = self._ready, []
        parts = [(self._names[id(p)], view) for b in ready for p, view in zip(b.params, b.views, strict=True)]
        changes, recent = self._shared(parts)
        limit = self.xi / self.dp.size**2 * float(recent.sum())
        uploads = [replica for replica, change in enumerate(changes) if not change <= limit]
        mine = self.dp.index in uploads
        news = {name: view.clone() for name, view in parts} if mine else {}
        if len(uploads) > 1:
            for name, view in () if mine else parts:
                view.copy_(self.uploaded[name])
            for bucket in ready:
                self._every_step.grad_ready(bucket)
            self._every_step.settle()
        else:
            for name, view in parts:
                view.sub_(self.uploaded[name]) if mine else view.zero_()
            for bucket in ready if uploads else ():
                self.dp.broadcast(bucket.flat, uploads[0])
            for name, view in parts:
                view.add_(self.total[name])
        self._after = recent, news, {name: view.clone() for name, view in parts}
        self._uploads = len(uploads)
        return Verdict.APPLY

    def _shared(self, parts: Sequence[tuple[str, Tensor]]) -> tuple[Sequence[float], Tensor]:
        """(of each replica, the square of its gradient's distance from what it uploaded; `taken` with the last update's
        gradient). A replica's ranks hold parts of both. Every rank calls it, or it hangs."""
        mine = [(name, view) for name, view in parts if name in self._counted]
        change = sum(float(((view - self.uploaded[name]).double() ** 2).sum()) for name, view in mine)
        moved = sum(float((self.total[name].double() ** 2).sum()) for name, _ in mine)
        said = torch.tensor([[float(self.dp.index), change, moved]], dtype=torch.float64)
        rows = self._world.all_gather(said.to(parts[0][1].device) if parts else said).tolist()
        changes = [sum(row[1] for row in rows if int(row[0]) == replica) for replica in range(self.dp.size)]
        last = sum(row[2] for row in rows if int(row[0]) == 0)
        return changes, torch.cat([self.taken.new_tensor([last]), self.taken[:-1]])

    @torch.no_grad()
    def after_update(self, step: int) -> None:
        self._every_step.after_update(step)
        if self._after is None:
            return
        recent, news, total = self._after
        self.taken.copy_(recent)
        for kept, new in ((self.uploaded, news), (self.total, total)):
            for name, x in new.items():
                kept[name].copy_(x)
        self._after = None

    def undone(self) -> None:
        """A step that is given up has uploaded nothing."""
        self._every_step.undone()
        self._after = None

    def metrics(self) -> Mapping[str, Any]:
        return {**self._every_step.metrics(), "uploads": self._uploads}

    def is_private(self, key: str) -> bool:
        return key.endswith("/uploaded")

    def state(self) -> Mapping[str, Tensor]:
        uploaded = {f"{name}/uploaded": x for name, x in self.uploaded.items()}
        return {**uploaded, **{f"{name}/total": x for name, x in self.total.items()}, "taken": self.taken}
