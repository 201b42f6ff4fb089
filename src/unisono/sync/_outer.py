"""Replicas that have weights of their own, and come together between steps: the live part of an `OuterPolicy`."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.codecs import Coder
from unisono.comm.group import Group
from unisono.sync import Sync, Verdict
from unisono.sync._around import SyncAround
from unisono.sync._slots import learning


@dataclass(frozen=True, slots=True)
class MailboxPlace:
    """A run's place among others, as `[launch]` says. url: of the mailbox. peer: this run's name. peers: how many begin
    together. quorum: letters of a round after which nobody waits longer than `grace_s` seconds; 0: all. alive_s:
    seconds after which a peer is lost. patience_s: how long to wait for a round at most."""

    url: str
    peer: str
    peers: int
    quorum: int
    grace_s: float
    alive_s: float
    patience_s: float


@dataclass(frozen=True, slots=True)
class Site:
    """What an outer policy finds on one rank.

    slots: `parallel.params.Slot`, all parameters of this rank. lock: the policy of the gradients of neighbouring
    replicas that are in lock-step. dp: the replicas that come together, one of each such neighbourhood, in order.
    coder: the live codec for all that they send. optimizer: the inner one. replica: the ranks of this replica. counted:
    names of the parameters of which this rank's box counts, since another rank of the replica may hold the same.
    buffers: of the model, that steps change, such as running statistics. steps: updates of the whole run, 0 where
    nobody knows. servers: as `[launch] servers` says. batch: samples of a step of all replicas. rate, max_norm: see
    `train.step.update.Update`. optimizer_over(slots): the recipe's optimiser over other tensors.
    mailbox: where this run meets others, if it does. owners: of second uses of tied weights, by name.
    """

    slots: Sequence[Any]
    lock: Sync
    dp: Group
    coder: Coder
    optimizer: Optimizer
    replica: Group
    counted: frozenset[str] = frozenset()
    buffers: Sequence[Tensor] = ()
    steps: int = 0
    servers: int = 1
    batch: int = 0
    rate: Callable[[int], float] = lambda step: 0.0
    max_norm: float = 0.0
    optimizer_over: Callable[[Sequence[Any]], Optimizer] | None = None
    mailbox: MailboxPlace | None = None
    owners: Mapping[str, str] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.slots[0].master.device if self.slots else torch.device("cpu")

    def learning(self) -> Iterator[Any]:
        """The slots that are trained, each storage once."""
        return learning(self.slots)


class OuterSync(SyncAround):
    """A live policy whose replicas have weights and optimiser states of their own. Gradients are those of `site.lock`.

    Where replicas meet, a failure must leave every replica with a state of the run: `exchange` communicates and changes
    nothing that is kept; `merge` changes it and communicates nothing."""

    def __init__(self, site: Site) -> None:
        super().__init__(site.lock)
        self.site, self.group, self.equal = site, site.dp, False
        self.replicas = site.dp
        self._step = 0

    def before_step(self, step: int) -> None:
        self._step = step

    @abstractmethod
    def meets(self, step: int) -> bool: ...

    @abstractmethod
    def exchange(self, step: int) -> None: ...

    @abstractmethod
    def merge(self, step: int) -> None: ...

    @property
    def is_last(self) -> bool:
        """Whether the step under way is the run's last, after which the weights are those that are published."""
        return self._step + 1 == self.site.steps

    def average_buffers(self) -> None:
        """Give all replicas the mean of what their steps changed beside weights. Every replica calls it, or it
        hangs."""
        for buffer in self.site.buffers if self.group.size > 1 else ():
            if buffer.is_floating_point():
                buffer.copy_(self.group.all_reduce(buffer / self.group.size))

    def mean_distance(self, squared: Tensor) -> float:
        """The distance of a replica's weights from the mean of all: the root of its mean square over replicas. squared:
        float64 [], this rank's share of that of this replica. Every rank calls it, or it hangs."""
        squared = self.site.replica.all_reduce(squared.clone())
        return float(self.group.all_reduce(squared / self.group.size).sqrt())

    def settle_together(self) -> Verdict:
        """Before the update: gradients become the mean over all replicas, so that this step is one of lock-step."""
        verdict, slots, group = self.inner.settle(), list(self.site.learning()), self.group
        if group.size == 1:
            return verdict
        with torch.no_grad():
            have = torch.tensor([float(slot.master.grad is not None) for slot in slots])
            have = group.all_reduce(have.to(slots[0].master.device)) if slots else have
            for slot, count in zip(slots, have.tolist(), strict=True):
                if count:
                    if slot.master.grad is None:
                        slot.master.grad = torch.zeros_like(slot.master, dtype=slot.master.grad_dtype)
                    slot.master.grad = group.all_reduce(slot.master.grad.contiguous().div_(group.size))
        return verdict

    def center(self) -> Mapping[str, Tensor]:
        return self.outer

    @property
    def outer(self) -> Mapping[str, Tensor]:
        return {}

    @property
    def copied(self) -> Sequence[Tensor]:
        """What is kept between steps and is in no checkpoint, since it can be had again from other replicas."""
        return ()
