"""A pipeline that is not emptied between steps: rows go on over the end of a step, with the update inside (PipeDream).

What a rank plays in one call begins and ends in the middle of steps: `ranks - 1` backwards of the next step are done
before this one is reported. Its own update was made long before, and so was that of every stage; that is why nobody
waits when the step's numbers are added up over all stages. Where no later micro-batches are known, before a checkpoint
or an evaluation, the pipeline runs empty.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unisono.parallel.params import Slot
from unisono.parallel.play import StagePlayer
from unisono.parallel.player import BackwardCall, Leaf
from unisono.programs.pipeline import COMPUTE, Action, with_messages
from unisono.programs.schedules import Unflushed


class FlowPlayer(StagePlayer):
    """Plays one stage of an unflushed schedule. Leaves beyond the step's `micros` are those of later steps.

    whole: the row by which a step is known; others, as of an evaluation, are played as any row, when nothing is in
    flight. update(offset, losses): makes the update of the step that is `offset` after the one that is played; losses
    [micros]. until: micro-batches, counted as `base` is, beyond which nothing is begun. log: (micro-batch since the
    pipeline was empty, version of its forward, version of its backward).
    """

    def __init__(
        self, inner: StagePlayer, schedule: Unflushed, ranks: int, micros: int, slots: Sequence[Slot],
        whole: Sequence[Action],
    ) -> None:  # fmt: skip
        super().__init__(
            inner.stages, inner.post.wires, inner.recorder, inner.computing, inner.before_backward,
            dtype=inner.dtype, device=inner.device, halves=False,
        )  # fmt: skip
        (self.stage,) = self.stages
        self.schedule, self.ranks, self.micros, self.whole = schedule, ranks, micros, whole
        lag = min(schedule.stale(row, ranks, micros) for row in range(ranks))
        self.stash = Stash(slots, schedule.crosses(self.stage, ranks), lag)
        self.update: Callable[[int, Tensor], None] = lambda offset, losses: None
        self.all = schedule.timetable(ranks, max(micros, ranks))
        self._forget()

    def _forget(self) -> None:
        """Micro-batches are counted from here."""
        self.base = 0  # before this step
        self.backwards = self.known = 0  # done, and begun somewhere
        self._inputs, self._outputs, self._grads = {}, {}, {}
        self._losses: Any = {}  # micro-batch -> its loss, where the last stage is
        self.log: list[tuple[int, int, int]] = []
        self.until: int | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing is in flight."""
        return self.known == self.base

    def play(self, row: Sequence[Action], leaves: Sequence[Leaf], weight: float, seed: int | None) -> Tensor:
        if row is not self.whole:
            return super().play(row, leaves, weight, seed)
        if self.empty:
            self._forget()
            self.stash.rest()
        self._leaves: Any = {self.base + i: leaf for i, leaf in enumerate(leaves)} | {-1: None}
        self._weight, self._seed = weight, seed
        do: dict[str, Callable[[Action], None]] = {
            "F": self._forward, "B": self._backward, "U": self._update, "SEND_F": self._send_activation,
            "RECV_F": self._receive_activation, "SEND_B": self._send_gradient, "RECV_B": self._receive_gradient,
        }  # fmt: skip
        actions = self._next(len(leaves))
        for at, action in enumerate(actions):
            if action.kind in COMPUTE:
                self.post.ask_ahead(actions, at + 1)
            do[action.kind](action)
        losses = self._lost(self.base)
        self.base += self.micros
        self._losses = {micro: loss for micro, loss in self._losses.items() if micro >= self.base}
        self.post.finish(older=not self.empty)
        if self.empty:
            self.stash.rest()
        return losses

    def _next(self, count: int) -> Sequence[Action]:
        """This rank's actions up to where the call ends, with their messages."""
        begun = self.schedule.begun(self.stage, self.ranks, self.backwards, self.known)
        known = self.base + count if self.until is None else min(self.base + count, self.until)
        ends = max(self.base + self.micros, known - (self.ranks - 1))
        done = begun, self.backwards
        actions = self.schedule.stretch(self.stage, self.ranks, self.micros, done, ends, known)
        self.backwards, self.known = ends, known
        return [message for action in actions for message in with_messages(self.all, action)]

    def _forward(self, action: Action) -> None:
        version = self.schedule.version(self.stage, self.ranks, self.micros, action.micro)
        self.stash.forward(action.micro, version)
        super()._forward(action)

    def _backward(self, action: Action) -> None:
        used = self.stash.used[action.micro]
        self.log.append((action.micro, used, self.stash.backward(action.micro)))
        super()._backward(action)

    def _take_turn(self, action: Action, backward: Callable[[], None], **tags: str) -> None:
        last = (action.micro + 1) % self.micros == 0
        with self.recorder.span("backward", micro=action.micro, stage=action.stage, **tags):
            self.before_backward(BackwardCall(action.stage, action.micro, last, last))
            backward()

    def _update(self, action: Action) -> None:
        first = action.micro + 1 - self.micros
        self.stash.before_update()
        self.update((first - self.base) // self.micros, self._lost(first))

    def _lost(self, first: int) -> Tensor:
        """The losses of a step, [micros]; zeros where the last stage is not."""
        none = torch.zeros((), dtype=self.dtype, device=self.device)
        return torch.stack([self._losses.get(first + i, none).to(self.dtype) for i in range(self.micros)])

    def run_empty(self) -> None:
        """Begin nothing beyond the step of what the last call has begun."""
        self.until = -(-self.known // self.micros) * self.micros

    def abandon(self) -> None:
        """Let go of all that is in flight; gradients are the caller's."""
        begun = self.schedule.begun
        mine, sent = (
            begun(row, self.ranks, self.backwards, self.known) for row in (self.stage, self.stage - 1)
        )
        for micro in range(mine, sent if self.stage else mine):
            self.post.received(Action("RECV_F", self.stage, micro, self.stage - 1))
        self.post.finish()
        self._forget()
        self.stash.rest()


class Stash:
    """The weights of one stage, several versions of them while micro-batches are in flight.

    The optimiser steps masters in place. What is computed with is a copy by version: the live parameters are pointed at
    it before each forward and backward, so that what autograd has kept of a forward is what it was. updates: made so
    far. crosses: whether an update may come between a forward and its backward; else the masters are used themselves.
    lag: of how many updates before the last one weights are still asked for.
    """

    def __init__(self, slots: Sequence[Slot], crosses: bool, lag: int) -> None:
        self.slots, self.crosses, self.lag = slots, crosses or lag > 0, lag
        self.updates = 0
        self.held: dict[int, list[Tensor]] = {}
        self.users: Counter[int] = Counter()
        self.used: dict[int, int] = {}  # micro-batch in flight -> its version

    def forward(self, micro: int, version: int) -> None:
        """Before a forward that uses this version."""
        self.users[version] += 1
        self.used[micro] = version
        self._point(version)

    def backward(self, micro: int) -> int:
        """Before a backward; returns the version, that of the micro-batch's forward."""
        version = self.used.pop(micro)
        self._point(version)
        self.users[version] -= 1
        return version

    def before_update(self) -> None:
        """Keep what is asked for later, and let go of what is not."""
        if self.lag:
            self._keep(self.updates)
        self.updates += 1
        for version in [v for v in self.held if not self.users[v] and v < self.updates - self.lag]:
            del self.held[version]

    def rest(self) -> None:
        """Nothing is in flight: the live parameters are the masters again, and versions are counted from here."""
        self.updates, self.held, self.used = 0, {}, {}
        self.users.clear()
        for slot in self.slots:
            slot.live.data = slot.master.data

    @torch.no_grad()
    def _keep(self, version: int) -> None:
        if version not in self.held:
            if version != self.updates:
                raise RuntimeError(
                    f"version {version} of the weights is asked for and gone; now is {self.updates}"
                )
            self.held[version] = [slot.master.detach().clone() for slot in self.slots]

    def _point(self, version: int) -> None:
        if not self.crosses:
            if version != self.updates:
                raise RuntimeError(
                    f"version {version} of the weights is asked for, and {self.updates} is there"
                )
            return
        self._keep(version)
        for slot, tensor in zip(self.slots, self.held[version], strict=True):
            slot.live.data = tensor


def set_apart(slots: Sequence[Slot]) -> list[Slot]:
    """The slots with masters of their own, of the same storage until something is stashed."""
    return [
        replace(slot, master=torch.nn.Parameter(slot.live.data, requires_grad=slot.live.requires_grad))
        for slot in slots
    ]
