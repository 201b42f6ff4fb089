"""The gradient's way out of a rank, and back: all between "autograd made a gradient" and "the update has one".

    begin    before each backward; during the step's last one, buckets leave as they fill
    close    sums inside the replica are finished, then replicas meet
    numbers  norm and loss of the whole step, and whether any rank was asked to stop
    forget   after the update

*Early* gradients are final as backward makes them; they leave while backward goes on. *Late* ones need a sum first: of
the two uses of a tied weight, of shards, or of leaves along their tree. *Partial* ones are late too: they need a sum
over axes of the replica, such as `tp` (`Slot.sum_over`).

A parameter without a gradient on any replica keeps none, and the optimiser skips it, as on one device. If some replica
has one, the others add zeros. Ranks of one replica share a batch, so they use the same parameters.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from unisono.comm.bucket import Bucket
from unisono.comm.group import Group
from unisono.comm.tree import TreeSum
from unisono.parallel.mirror import ALONE, Mirror
from unisono.parallel.params import Slot
from unisono.parallel.player import BackwardCall
from unisono.parallel.shard import Whole
from unisono.parallel.ties import Tie
from unisono.sync import Sync, Verdict
from unisono.train.step.bucketing import departures
from unisono.train.step.grad_norm import Measure
from unisono.train.step.numbers import Line, LossPlaces, Numbers


class Gradients:
    """All gradients of one rank.

    dp: the replicas, which meet as `sync` says. inner(axes): the group of this rank over axes of its replica. trees: by
    name, how the leaves' gradients are added up, where the policy prescribes an order; else empty.
    Every member of `dp` makes one, or it hangs.
    overlap: whether weights change within a step, because those of one step and of the next are under way at once.
    """

    overlap: ClassVar[bool] = False

    def __init__(
        self,
        slots: Iterable[Slot],
        dp: Group,
        sync: Sync,
        *,
        ties: Sequence[Tie] = (),
        mirror: Mirror = ALONE,
        sharding: Mapping[int, Whole] | None = None,
        inner: Callable[[frozenset[str]], Group] | None = None,
        trees: Mapping[str, TreeSum] | None = None,
        places: LossPlaces | None = None,
    ) -> None:
        held = list(slots)
        self.slots = [slot for slot in held if slot.live.requires_grad]
        self.ties = [tie for tie in ties if tie.here[0].live.requires_grad]
        self.dp, self.sync, self.sharding, self.mirror = dp, sync, sharding or {}, mirror
        self._lacking: set[int] | None = (
            None  # what has no gradient here, until it is known who else lacks it
        )
        self.unused: tuple[str, ...] = ()  # names of what had no gradient on any replica in the last step
        self.trees, self._final, self._next = trees or {}, False, 0
        leaving = departures(self.slots, self.ties, dp, inner, bool(self.trees), sync.cap, sync.sliced)
        self._early, self._late, self._partial = leaving.early, leaving.late, leaving.partial
        self._modules = {
            id(p): slot.name.rpartition(".")[0] for slot in held for p in (slot.live, slot.master)
        }
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._hook(bucket, part))
            for p, bucket, part in leaving.arrivals()
        ]
        self._wait_anew()
        self.line = Line(places or LossPlaces(), dp, held[0].master.device if held else torch.device("cpu"))
        self._carried: Callable[[], Tensor] | None = None
        self._halves: list[bool] = []  # of each tie: whether zeros stood for this rank's half

    def assign(self, leaves: int, places: LossPlaces) -> None:
        """From the next step on this rank computes so many leaves, whose losses have these places."""
        for tree in self.trees.values():
            tree.count = leaves
        self.line.place(places)

    def carry(self, share: Callable[[], Tensor]) -> None:
        """One more number to sum over all ranks in each step, beside the losses and in the same message: then it is
        `Numbers.squares`. share(): this rank's part of it, [], after its last backward. Every rank calls it."""
        self._carried = share
        self.line = Line(self.line.places, self.dp, self.line.values.device, more=1)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's gradients that replicas add up."""
        return sum(bucket.body.nbytes for bucket in (*self._early, *self._late))

    def _hook(self, bucket: Bucket, part: slice | None) -> Callable[[nn.Parameter], None]:
        """part: that ends with this parameter, if one does. It moves into the buffer at once, while the CPU's cache has
        it; for late buckets also since nothing hides the time of copying once backward is over."""

        def arrived(_: nn.Parameter) -> None:
            bucket.waiting -= 1  # below zero in late buckets, for which nobody waits
            if bucket.waiting == 0:
                self._full(bucket)
            elif part is not None:
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

    def _depart(self) -> None:
        """Hand over early buckets that are full, in their order."""
        while self._next < len(self._early) and self._early[self._next].waiting == 0:
            self._next += 1
            self._hand_over(self._early[self._next - 1])

    def _hand_over(self, bucket: Bucket) -> None:
        """Let the replicas add up a bucket; the call is logged under the module whose gradient came last."""
        calls = self.dp.recorder.calls
        calls.module = self._modules.get(id(bucket.params[-1]), "")
        self.sync.grad_ready(bucket)
        calls.module = ""

    def begin(self, turn: BackwardCall) -> None:
        """A backward towards weights is about to begin."""
        if turn.stage in self.sharding:
            self.sharding[turn.stage].before_backward(turn.last)
        if turn.final:
            self.arm()

    def arm(self) -> None:
        """The backward that follows is this step's last: buckets leave as they fill."""
        self._final, self._next = True, 0
        self._wait_anew()

    def _wait_anew(self) -> None:
        for bucket in self._early:
            bucket.waiting = len(bucket.params)

    def leaf_done(self, leaf: int) -> None:
        """After the backward of one leaf: take its gradients into the trees, if there are any."""
        for slot in self.slots:
            slot.take_gradient()
            grad = slot.master.grad
            slot.drop_gradient()
            if grad is not None:
                self.trees[slot.name].take(leaf, grad)

    def close(self, losses: Tensor | None = None, stop: bool = False) -> Verdict:
        """After the last backward: finish what replicas and then stages add up. losses: of this rank's leaves. stop:
        whether this rank was asked to. Every rank calls it, or it hangs."""
        self._close_replica()
        departing = [bucket for _, group in self._partial for bucket in group] + [*self._late]
        lacking = self.sync.lacking([p for bucket in (*self._early, *departing) for p in bucket.absent])
        self.line.write(losses, stop, bool(lacking))
        if self._carried is not None:
            self.line.values[-3].copy_(self._carried())
        sending = self.line.send()
        for bucket in departing if self.dp.size > 1 else ():
            self._hand_over(bucket)
        verdict = self.sync.settle()
        self.line.receive(sending)
        self.unused, self._lacking = (), {id(p) for p in lacking}
        if self._meets_others:  # who add up what there is
            self.drop_unused()
        self._join_uses()
        return verdict

    def _join_uses(self) -> None:
        """When replicas have met, add up what stages have of one weight. Every rank calls it, or it hangs."""
        (ALONE if self.trees else self.mirror).add_up(self.slots, self.ties)
        for tie in self.ties if self.trees else ():
            tie.add_uses()  # one order for all layouts: replicas first, then the uses
        self._halves = [tie.join() for tie in self.ties]
        if self._meets_others:
            self.line.values[-1].fill_(sum(self._halves))

    def next(self, measure: Measure) -> Numbers | None:
        """After the update: the numbers of one more gradient that was on its way, which the slots have now; None where
        there is none. Every rank calls it, or it hangs."""
        if not self.sync.next_gradient():
            return None
        self._join_uses()
        return self.numbers(measure)

    def _close_replica(self) -> None:
        """Finish the sums inside this replica; all buckets are full then, and the early ones have left."""
        for bucket in self._early:
            if bucket.waiting:
                bucket.fill()
                bucket.waiting = 0
        self._depart()
        self._final = False
        self._wait_anew()  # the next step's first backward may not be its last
        for slot in self.slots:
            if not self.trees:
                slot.take_gradient()
            else:
                slot.master.grad = self.trees[slot.name].close()
        (self.mirror if self.trees else ALONE).add_up(self.slots)  # halves are branches below a replica's own
        for tie in self.ties if not self.trees else ():
            tie.add_uses()
        for group, partial in self._partial:
            for bucket in partial:
                bucket.fill()
                group.all_reduce(bucket.body)
        for bucket in self._late:
            bucket.fill()

    @property
    def _meets_others(self) -> bool:
        """Whether other stages add up gradients with this one: each has to know before whether it has any."""
        return self.mirror.group is not None or any(len(tie.here) == 1 for tie in self.ties)

    def drop_unused(self, count: float | None = None) -> None:
        """Forget gradients that all replicas lack; none is asked which unless one lacks some. count: of replicas that
        do, where it is known: to look for it is to wait for a GPU."""
        lacking, self._lacking = self._lacking, None
        if count is None:
            count = bool(lacking) if self.dp.size == 1 else float(self.line.values[-1])
        if lacking is None or not count:
            return
        there = self.line.values.new_tensor([not {id(s.live), id(s.master)} & lacking for s in self.slots])
        for slot, count in zip(self.slots, self.dp.all_reduce(there).tolist(), strict=True):
            if not count:
                slot.drop_gradient()
                self.unused += (slot.name,)
        for owner, alias in (tie.here for tie in self.ties if len(tie.here) == 2):
            if owner.master.grad is None:
                alias.drop_gradient()

    def numbers(self, measure: Measure) -> Numbers:
        """What the step comes to, in one small sum over the replica. Every rank calls it, or it hangs."""
        norm, *line = measure(self.slots, self.line.values)
        self.drop_unused(line[-1])
        if line[-1]:
            for tie, lacks in zip(self.ties, self._halves, strict=True):
                tie.drop_unused(lacks)
        *losses, squares = line[:-2] if self._carried is not None else (*line[:-2], None)
        return Numbers(norm, math.fsum(losses), line[-2] > 0, squares=squares)

    def forget(self) -> None:
        """Drop this step's gradients."""
        for slot in self.slots:
            slot.drop_gradient()

    def release(self) -> None:
        """Let go of the parameters: others will see to their gradients from now on."""
        self.forget()
        for hook in self._hooks:
            hook.remove()
