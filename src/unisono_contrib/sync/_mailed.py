"""Rounds of local steps whose replicas are runs of their own, and meet through a mailbox (see `comm.mailbox`).

What `_rounds` does over `dp`, with the mean from the letters of a round instead. The first rank of the run speaks for
all: it posts and reads whole parameters, so that peers may be cut in different ways inside.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from unisono.comm.group import Group
from unisono.comm.outside import OutsideWait
from unisono.sync import SampleLane
from unisono.sync._outer import MailboxPlace, Site
from unisono_contrib.sync._mail import BUFFER, Mail, Met, RoundResult
from unisono_contrib.sync._rounds import OuterOptimizer, RoundsSync, Timing
from unisono_contrib.sync._whole import Boxes, BoxShape

MOMENTUM = "momentum/"


class MailedSync(RoundsSync):
    """State beside that of `RoundsSync`: `tokens`, the targets of this run's steps since the last round; with a quorum
    `NAME/late` and `late_tokens`, what was learnt in a round that others have ended without this run: it counts in the
    next one. `rounds` is the number of the round under way, the same for all peers."""

    def __init__(self, site: Site, place: MailboxPlace, timing: Timing, optimizer: OuterOptimizer) -> None:
        super().__init__(site, timing, optimizer)
        self._place, self._fragment = place, self.fragments[0]
        self._tokens = torch.zeros((), dtype=torch.float64)
        self._late_tokens = torch.zeros((), dtype=torch.float64)
        local = self._fragment.local if place.quorum else {}
        self._late = {name: torch.zeros_like(x) for name, x in local.items()}
        self._counting, self._stops, self._resumed = 0.0, False, False
        self._met: Met | None = None
        self._posted: dict[str, Tensor] = {}
        self._mail: Mail | None = None
        self._arrived = False
        self._stop_wish: Callable[[], bool] = lambda: False
        self._says: dict[str, Any] = {}
        self.lane = SampleLane(0, place.peers)

    def among(
        self, world: Group, replica: Group | None = None, counted: frozenset[str] = frozenset()
    ) -> None:
        """Before the first step: all ranks of this run."""
        site, fragment = self.site, self._fragment
        slots = {slot.name: slot for slot in site.learning()}
        # A second use of a tied weight on another rank is posted once, under its owner's name.
        self._names = {name: site.owners.get(name, name) for name in fragment.local}
        parts = {
            self._names[name]: BoxShape(
                tuple(slots[name].shape), tuple(slots[name].start), tuple(x.shape), x.dtype
            )
            for name, x in fragment.local.items()
        }
        self._changed = {
            f"{BUFFER}{site.replica.index}/{i}": x
            for i, x in enumerate(site.buffers)
            if x.is_floating_point()
        }
        whole = {
            n: BoxShape(tuple(x.shape), (0,) * x.dim(), tuple(x.shape), x.dtype)
            for n, x in self._changed.items()
        }
        self._weights = Boxes(parts, site.replica, world, site.device)
        self._buffers = Boxes(whole, site.replica, world, site.device)
        self._world, self._wait = world, OutsideWait(world, site.device)

    def meets(self, step: int) -> bool:
        """All replicas of this run are in lock-step, and hear of each other in each step."""
        return True

    def weigh(self, count: float) -> float:
        self._counting = count * self.inner.dp.size
        return super().weigh(count)

    def deliver(self, step: int, norm: float, stop: bool) -> None:
        self._stops = stop
        super().deliver(step, norm, stop)

    def heed(self, stop: Callable[[], bool]) -> None:
        self._stop_wish = stop

    def undone(self) -> None:
        self._counting = 0.0
        super().undone()

    def after_update(self, step: int) -> None:
        self._tokens += self._counting
        self._counting = 0.0
        super().after_update(step)

    @torch.no_grad()
    def proceed(self, step: int) -> int:
        if not self._arrived:
            self._arrived = True
            step = self._arrive(step)
        if (met := self._met) is not None:
            self._met = None
            if met.outcome.skipped:
                return self._step_of(int(self.rounds))
            self._publish()
        return step

    def _arrive(self, step: int) -> int:
        """Find out how far the others are."""
        arrival = None
        if self._world.index == 0:
            facts = {"h": self.timing.h, **_options(self._fragment.optimizer.defaults)}
            self._mail = Mail(self._place, facts)
        arrival = self._wait.until(lambda: self._mail.arrive() if self._mail else None)
        place, newest = self._heard([float(arrival.place), float(arrival.round)] if arrival else [0.0, 0.0])
        self.lane = SampleLane(int(place), self._place.peers)
        rounds_due = step // self.timing.h + bool(step == self.timing.steps and step % self.timing.h)
        if not self._resumed:  # from the beginning, or from a checkpoint of a run without peers
            self.rounds.fill_(rounds_due)
        if newest > int(self.rounds):
            boxes = self._boxes_of(arrival.published if arrival else {}, momentum=True)
            self._adopt(boxes, int(newest))
            return self._step_of(int(newest))
        if rounds_due > int(self.rounds):  # it was stopped after it had posted
            self._meet()
            self.merge(step - 1)
        elif newest < int(self.rounds):
            self._publish()
        return step

    def _step_of(self, round: int) -> int:
        """The first step of a round."""
        step = round * self.timing.h
        return min(step, self.timing.steps) if self.timing.steps else step

    @torch.no_grad()
    def exchange(self, step: int) -> None:
        if any(self._sent(step)):
            self._meet(posts_alone=self._stops and step + 1 != self.timing.steps)

    def _meet(self, posts_alone: bool = False) -> None:
        """Post what was learnt and take what counts of all. posts_alone: wait for nobody, since this run ends."""
        deltas, tokens, round = self._to_post(), float(self._tokens + self._late_tokens), int(self.rounds)
        whole = {**self._gather(deltas), **self._buffers.gather(self._changed)}
        mail = self._mail
        if posts_alone:
            self._wait.until(lambda: mail.post(round, whole, tokens) if mail else None)
            return
        met = self._wait.until(lambda: mail.exchange(round, whole, tokens) if mail else None, self._stop_wish)
        if mail is not None and met is None:
            mail.abandon()
        self._met, self._posted = self._share(met), deltas

    def _gather(self, boxes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors like the parameters, under their owners' names. boxes: of this rank."""
        return self._weights.gather({self._names[name]: x for name, x in boxes.items()})

    def _to_post(self) -> dict[str, Tensor]:
        """By name, what this run has learnt, with what it could not post in time."""
        learnt = {name: p.data - self._fragment.local[name] for name, p in self._fragment.outer.items()}
        if not (late := float(self._late_tokens)):
            return learnt
        share = late / (late + float(self._tokens))
        return {name: x.lerp(self._late[name], share) for name, x in learnt.items()}

    def _share(self, met: Met | None) -> Met | None:
        """met: on the first rank, None if it was asked to stop. On all: with this rank's boxes for tensors."""
        outcome = RoundResult(
            *self._heard([float(x) for x in met.outcome] if met is not None else [-1.0] * 9)
        )
        if outcome.round < 0:
            return None
        tensors = met.tensors if met is not None else {}
        return Met(outcome, self._boxes_of(tensors, momentum=bool(outcome.skipped)))

    def _boxes_of(self, tensors: Mapping[str, Tensor], momentum: bool) -> dict[str, Tensor]:
        """This rank's boxes of weights and buffers, and of the outer momentum if there is some. tensors: on the first
        rank, whole."""
        boxes = {**self._weights.scatter(tensors), **self._buffers.scatter(tensors)}
        if momentum and self._fragment.momentum:
            more = self._weights.scatter(tensors, MOMENTUM)
            boxes |= {MOMENTUM + name: x for name, x in more.items()}
        return boxes

    def _heard(self, numbers: list[float]) -> list[float]:
        """numbers: the first rank's, on all."""
        if self._world.size == 1:
            return numbers
        said = torch.tensor(numbers, dtype=torch.float64, device=self.site.device)
        return self._world.broadcast(said).tolist()

    @torch.no_grad()
    def merge(self, step: int) -> None:
        if (met := self._met) is None:
            return
        outcome = met.outcome
        if outcome.skipped:
            self._adopt(met.tensors, int(outcome.round))
        else:
            for name, outer in self._fragment.outer.items():
                outer.grad = met.tensors[self._names[name]]
            self._fragment.alone = bool(outcome.alone)
            self._due = [self._fragment]
            super().merge(step)
            for name, buffer in self._changed.items():
                buffer.copy_(met.tensors[name])
            self._keep_late(bool(outcome.counted))
            self._distance = outcome.distance
        self._posted = {}
        self.rounds.fill_(int(outcome.round))
        self.group.recorder.count("dp", "post", int(outcome.sent))
        self._says = {
            "cohort": int(outcome.cohort), "round": int(outcome.round), "mailbox_wait_s": outcome.waited,
            "posted_bytes": int(outcome.sent), "fetched_bytes": int(outcome.received),
        }  # fmt: skip

    def _keep_late(self, counted: bool) -> None:
        """What has not counted in this round counts in the next one, where a quorum waits for nobody."""
        kept = bool(self._late) and not counted
        for name, late in self._late.items():
            late.copy_(self._posted[name]) if kept else late.zero_()
        self._late_tokens.fill_(float(self._tokens + self._late_tokens) if kept else 0.0)
        self._tokens.zero_()

    @torch.no_grad()
    def _adopt(self, boxes: Mapping[str, Tensor], round: int) -> None:
        """Go on with weights and momentum that others have published; the inner optimiser's state stays."""
        for name, outer in self._fragment.outer.items():
            outer.copy_(boxes[self._names[name]])
            outer.grad = None
            self._fragment.local[name].copy_(outer)
        for name, x in self._fragment.momentum.items():
            x.copy_(boxes[MOMENTUM + self._names[name]])
        for name, buffer in self._changed.items():
            buffer.copy_(boxes[name])
        for late in self._late.values():
            late.zero_()
        self.rounds.fill_(round)
        self._tokens.zero_()
        self._late_tokens.zero_()

    def _publish(self) -> None:
        outer = {name: p.data for name, p in self._fragment.outer.items()}
        state = {**self._gather(outer), **self._buffers.gather(self._changed)}
        if momentum := self._fragment.momentum:
            state |= {MOMENTUM + name: x for name, x in self._gather(momentum).items()}
        mail, round = self._mail, int(self.rounds)
        sent = self._wait.until(lambda: mail.publish(round, state) if mail else None)
        if self._says and sent:
            self._says["posted_bytes"] += sent

    def state(self) -> Mapping[str, Tensor]:
        late = {f"{name}/late": x for name, x in self._late.items()}
        late |= {"late_tokens": self._late_tokens} if late else {}
        return {**super().state(), "tokens": self._tokens, **late}

    def load(self, state: Mapping[str, Tensor]) -> None:
        super().load(state)
        self._resumed = "tokens" in state

    def metrics(self) -> Mapping[str, Any]:
        says, self._says = self._says, {}
        return {**super().metrics(), **says}

    def close(self) -> None:
        if self._mail is not None:
            self._mail.close()
        super().close()


def _options(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Of the outer optimiser, in which peers have to be alike."""
    return {f"outer {key}": defaults[key] for key in ("lr", "momentum") if key in defaults}
