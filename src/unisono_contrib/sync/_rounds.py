"""Rounds of local steps: what replicas have learnt since they last met crosses `dp`, and an outer optimiser takes it.

Of each parameter there is an *outer* weight, alike on all replicas. A round ends with a pseudo-gradient, the outer
weight minus the replica's own, averaged over replicas through the codec; the outer optimiser steps the outer weight by
it, and the replica's own becomes the outer one (DiLoCo, Douillard et al. 2023; Reddi et al. 2021 for the form).

Parameters lie in fragments of about as many bytes. Each has an optimiser and buckets of its own, and its own steps in
which it is due (Streaming DiLoCo, Douillard et al. 2025).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from unisono.codecs import Coder
from unisono.comm.bucket import Bucket, deal
from unisono.comm.group import Group
from unisono.sync import Verdict
from unisono.sync._drive import Drive
from unisono.sync._kept import STEPS
from unisono.sync._outer import OuterSync, Site
from unisono_contrib.sync._servers.shard import shares

OuterOptimizer = Callable[[Sequence[nn.Parameter]], Optimizer]
MOMENTUM = "momentum_buffer"


def nesterov(lr: float, momentum: float) -> OuterOptimizer:
    """The outer optimiser of DiLoCo: SGD with Nesterov's momentum; plain SGD where `momentum` is 0, with which torch
    has no Nesterov."""
    return lambda params: SGD(params, lr=lr, momentum=momentum, nesterov=momentum > 0.0)


@dataclass(frozen=True, slots=True)
class Timing:
    """When fragments are sent and merged. h: steps of a round. delay: steps from sending to merging. count: fragments,
    whose turns are spread over the round. warmup: steps of lock-step before the first round. steps: of the run, after
    the last of which all fragments are sent and merged at once; 0 where nobody knows."""

    h: int
    delay: int = 0
    count: int = 1
    warmup: int = 0
    steps: int = 0

    def is_sent(self, fragment: int, step: int) -> bool:
        """Whether a fragment is sent after step `step` (from 0)."""
        n, offset = step + 1 - self.warmup, fragment * self.h // self.count
        if n <= 0 or step + 1 == self.steps:
            return n > 0
        if self.delay and self.steps and step + self.delay + 1 >= self.steps:
            return False  # it would come too late, and is sent after the last step
        return n >= offset and (n - offset) % self.h == 0

    def due(self, sent: int, step: int) -> bool:
        """Whether what was sent after step `sent` is merged after step `step`."""
        return sent >= 0 and (step >= sent + self.delay or step + 1 == self.steps)


class Fragment:
    """Parameters that are sent in the same steps.

    local: this replica's masters by name. outer: weights that all replicas have alike. sent: the step after which its
    exchange began, -1 for none. arrived: whether gradients of the outer weights are the replicas' mean. late: whether
    steps may lie between sending and merging, so that a checkpoint has to keep a mean that has arrived."""

    def __init__(
        self, local: Mapping[str, Tensor], coder: Coder, group: Group, optimizer: OuterOptimizer, late: bool
    ) -> None:
        self.local = dict(local)
        self.outer = {name: nn.Parameter(x.detach().clone()) for name, x in local.items()}
        self.optimizer = optimizer(list(self.outer.values()))
        self.drive = Drive(coder, group, self.outer)
        self._buckets = [Bucket(run, group.size) for run in deal(list(self.outer.values()))]
        self.sent, self.arrived = -1, False
        self.alone = group.size == 1  # whether the mean is of this replica's weights and of no other's
        self._kept_mean = (
            {f"{name}/mean": torch.zeros_like(p) for name, p in self.outer.items()} if late else {}
        )
        self._kept_sent = torch.tensor(-1)
        if self.optimizer.defaults.get("momentum"):
            for p in self.outer.values():  # from the start, so that a checkpoint can fill it
                self.optimizer.state[p][MOMENTUM] = torch.zeros_like(p)

    @property
    def momentum(self) -> dict[str, Tensor]:
        """By name, what the outer optimiser keeps."""
        states = ((name, self.optimizer.state.get(p, {})) for name, p in self.outer.items())
        return {name: state[MOMENTUM] for name, state in states if MOMENTUM in state}

    @torch.no_grad()
    def send(self, step: int, share: float) -> None:
        """Send the pseudo-gradient, of which this replica's counts for `share`. Every replica calls it, or it hangs."""
        for name, outer in self.outer.items():
            outer.grad = (outer - self.local[name]).mul_(share)
        for bucket in self._buckets:
            bucket.fill()
            self.drive.begin(bucket)
        self.sent = step

    def receive(self) -> None:
        """Wait for what all replicas have sent."""
        if not self.arrived:
            self.drive.finish()
            self.arrived = True

    @torch.no_grad()
    def merge(self, alpha: float) -> None:
        """Step the outer weights. The replica's own keep `alpha` of themselves and get the rest from the outer ones."""
        if self._is_replacement:
            self.adopt()
        else:
            self.optimizer.step()
        self.drive.kept.settled()
        for name, outer in self.outer.items():
            self.local[name].lerp_(outer, 1.0 - alpha) if alpha else self.local[name].copy_(outer)
            outer.grad = None
        self.sent, self.arrived = -1, False

    @property
    def _is_replacement(self) -> bool:
        """Whether an outer step has one replica's weights as its result, of which not even rounding may be left."""
        plain = self.optimizer.defaults["lr"] == 1.0 and not self.optimizer.defaults.get("momentum")
        return plain and self.alone and not self.drive.coder.loses

    def in_flight(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of a fragment that has arrived and is not merged yet, by `NAME/mean`, and `sent`.
        What is still on its way is not kept: the fragment is then sent in its next turn."""
        if not self._kept_mean:
            return {}
        self._kept_sent.fill_(self.sent if self.arrived else -1)
        for name, outer in self.outer.items() if self.arrived else ():
            self._kept_mean[f"{name}/mean"].copy_(outer.grad if outer.grad is not None else torch.zeros(()))
        return {**self._kept_mean, "sent": self._kept_sent}

    def resume(self) -> None:
        """Go on from what `in_flight` gave, filled from a checkpoint."""
        self.sent, self.arrived = int(self._kept_sent), int(self._kept_sent) >= 0
        for name, outer in self.outer.items():
            outer.grad = self._kept_mean[f"{name}/mean"].clone() if self.arrived else None

    @torch.no_grad()
    def take_over(self, group: Group, source: int, sent: int, others_merged: bool) -> None:
        """Become what replica `source` has. sent: after which step it sent what has arrived there, -1 if nothing has.
        Every replica calls it, or it hangs."""
        for name, outer in self.outer.items():
            group.broadcast(outer.data, source)
            if others_merged:
                self.local[name].copy_(outer)
            if sent >= 0:
                mean = outer.grad if outer.grad is not None else torch.zeros_like(outer)
                group.broadcast(mean, source)
                outer.grad = mean
        for x in self.momentum.values():
            group.broadcast(x, source)
        self.sent, self.arrived = sent, sent >= 0

    @torch.no_grad()
    def adopt(self) -> None:
        """The outer weights are the replica's own from here on."""
        for name, outer in self.outer.items():
            outer.copy_(self.local[name])

    @torch.no_grad()
    def squared_distance(self, counted: frozenset[str]) -> Tensor:
        """float64 []: the squared distance of this replica's weights from the mean, of parameters in `counted`, once
        that has arrived."""
        parts = [
            torch.sum((outer - self.local[name] - outer.grad).double() ** 2)
            for name, outer in self.outer.items()
            if name in counted and outer.grad is not None
        ]
        device = next(iter(self.local.values())).device if self.local else torch.device("cpu")
        return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64, device=device)


class RoundsSync(OuterSync):
    """State, alike on all replicas: `NAME/outer_momentum`, if the outer optimiser keeps it; `rounds`, the merges made;
    beside what the codec keeps. The outer weights are the run's."""

    def __init__(self, site: Site, timing: Timing, optimizer: OuterOptimizer, alpha: float = 0.0) -> None:
        super().__init__(site)
        self.timing, self.alpha = replace(timing, steps=site.steps), alpha
        masters = [(slot.name, slot.master) for slot in site.learning()]
        owned, count = dict(masters), max(1, min(timing.count, len(masters)))
        # Layers that are alike go to one after the other, so that all depths are in each.
        parts = shares({name: x.nbytes for name, x in masters}, count)
        self.fragments = [
            Fragment(
                {name: owned[name] for name in part}, site.coder, self.group, optimizer, timing.delay > 0
            )
            for part in parts
        ]
        self.kept = self.fragments[0].drive.kept if count == 1 else None
        self.shares = bool(site.coder.keeps)
        self.rounds = torch.zeros((), dtype=torch.int64)
        self._due: list[Fragment] = []
        self._distance: float | None = None

    def meets(self, step: int) -> bool:
        return step < self.timing.warmup or any(self._sent(step))

    def _sent(self, step: int) -> Iterator[Fragment]:
        return (f for i, f in enumerate(self.fragments) if self.timing.is_sent(i, step))

    def settle(self) -> Verdict:
        return self.settle_together() if self._step < self.timing.warmup else self.inner.settle()

    def exchange(self, step: int) -> None:
        for fragment in self._sent(step):
            fragment.send(step, 1.0 / self.group.size)
        self._due = [f for f in self.fragments if self.timing.due(f.sent, step)]
        for fragment in self._due:
            fragment.receive()
        if self._due:
            self.average_buffers()
            squared = torch.stack([f.squared_distance(self.site.counted) for f in self._due]).sum()
            self._distance = self.mean_distance(squared)

    def merge(self, step: int) -> None:
        if step < self.timing.warmup:
            for fragment in self.fragments:
                fragment.adopt()
        for fragment in self._due:
            fragment.merge(self.alpha if self.timing.delay and step + 1 != self.timing.steps else 0.0)
        self.rounds += bool(self._due)
        self._due = []

    @property
    def alike(self) -> Sequence[Tensor]:
        """What a kind of rounds keeps beside these, alike on all replicas, and changes in merges alone."""
        return ()

    @property
    def outer(self) -> Mapping[str, Tensor]:
        return {name: p.data for f in self.fragments for name, p in f.outer.items()}

    @torch.no_grad()
    def agree(self) -> None:
        """A rank that was lost may have left some replicas with a merge that others lack, or with a mean that has
        arrived: these take it over."""
        mine = [int(self.rounds), *(f.sent if f.arrived else -1 for f in self.fragments)]
        rows = self.group.all_gather(torch.tensor([mine], device=self.site.device)).tolist()
        newest = max(rows)
        if all(row == newest for row in rows):
            return
        source, behind = rows.index(newest), mine[0] < newest[0]
        for fragment, sent in zip(self.fragments, newest[1:], strict=True):
            fragment.take_over(self.group, source, sent, others_merged=behind)
        for x in self.alike:
            x.copy_(self.group.broadcast(x.to(self.site.device), source))
        self.rounds.fill_(newest[0])

    def state(self) -> Mapping[str, Tensor]:
        kept = {name: x for f in self.fragments for name, x in f.drive.state.items() if name != STEPS}
        steps = {
            f"{STEPS}{i or ''}": f.drive.kept.steps
            for i, f in enumerate(self.fragments)
            if STEPS in f.drive.state
        }
        momentum = {f"{n}/outer_momentum": x for f in self.fragments for n, x in f.momentum.items()}
        late = {
            (f"{key}{i}" if key == "sent" else key): x
            for i, f in enumerate(self.fragments)
            for key, x in f.in_flight().items()
        }
        return {**self.inner.state(), **kept, **steps, **momentum, **late, "rounds": self.rounds}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.inner.load(state)
        for i, fragment in enumerate(self.fragments):
            if f"sent{i}" in state:
                fragment.resume()

    def center(self) -> Mapping[str, Tensor]:
        """Every replica calls it, or it hangs: what is on its way has arrived afterwards, so that it can be saved."""
        for fragment in self.fragments:
            if fragment.sent >= 0:
                fragment.receive()
        return self.outer

    def is_private(self, key: str) -> bool:
        return self.inner.is_private(key) or any(key in f.drive.kept.private for f in self.fragments)

    def metrics(self) -> Mapping[str, Any]:
        distance, self._distance = self._distance, None
        errors = [f.drive.sampler.take_error() for f in self.fragments]
        codec = {key: value for error in errors for key, value in error.items()}
        return {**self.inner.metrics(), **codec, **({} if distance is None else {"consensus": distance})}
