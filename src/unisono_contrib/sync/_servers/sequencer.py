"""The one order in which weights are updated and read, the same on all shards. No torch, no input or output.

Replicas announce their gradients, whose tensors they push to the shards; a shard says which it has. When all shards
have a gradient, it has arrived, whole or not at all. What a rule then decides is put into the log, which every shard
carries out entry by entry: so all replicas see the same versions, whichever shard is slow.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from unisono_contrib.sync._servers.rules import Clocks, Rule

Entry = dict[str, Any]
"""An entry of the log, as JSON has it. `op` is one of begun, took, combine, update, read, gather, gone."""


@dataclass(slots=True)
class StalenessTally:
    """What there is to tell of a run, since it was last asked for. staleness: gradients by their staleness. updates:
    made. used: gradients in them. late, refused: gradients that no update took, since they came too late or were not
    numbers. waits: readings that had to wait."""

    staleness: Counter[int] = field(default_factory=Counter)
    updates: int = 0
    used: int = 0
    late: int = 0
    refused: int = 0
    waits: int = 0

    def take(self) -> dict[str, Any]:
        """As JSON has it; counting begins anew."""
        most = max(self.staleness, default=-1)
        said = {
            "staleness": [self.staleness[i] for i in range(most + 1)],
            "updates": self.updates,
            "used": self.used,
            "late": self.late,
            "refused": self.refused,
            "waits": self.waits,
        }
        self.staleness.clear()
        self.updates = self.used = self.late = self.refused = self.waits = 0
        return said


@dataclass(frozen=True, slots=True)
class UpdateSchedule:
    """What an update follows. rate(step): the learning rate. max_norm: what the gradient of the whole model is clipped
    to, 0: off. steps: of the run, 0 where nobody knows."""

    rate: Callable[[int], float]
    max_norm: float = 0.0
    steps: int = 0


@dataclass(slots=True)
class _Push:
    """A gradient on its way. norm: of the whole model's, None until it is announced. at: shards that have it."""

    norm: float | None = None
    at: set[int] = field(default_factory=set)


class Sequencer:
    """Each method takes a message and returns new entries of the log. speaker: the replica that is told the tally.
    copies: shards that have the same parameters; those from number `shards` on are copies of those before."""

    def __init__(
        self,
        rule: Rule,
        schedule: UpdateSchedule,
        workers: Iterable[int],
        shards: int,
        speaker: int = 0,
        copies: int = 1,
    ) -> None:
        self.rule, self.schedule, self.shards, self.speaker = rule, schedule, shards, speaker
        self.holders = shards * copies
        self.clocks, self.tally = Clocks(0, set(workers)), StalenessTally()
        self._begun: dict[int, int] = {}
        self._filled: set[int] = set()
        self._forget()

    def _forget(self) -> None:
        self._pushes: dict[tuple[int, int], _Push] = {}
        self._arrived: deque[tuple[int, int]] = deque()
        self._norms: dict[tuple[int, int], float] = {}
        self._stale: dict[tuple[int, int], int] = {}
        self._reading: dict[int, int] = {}
        self._gathering: set[int] = set()
        self._combining: tuple[int, list[int], float] | None = None
        self._squares: dict[int, float] = {}
        self._attempt = 0
        self._highest = -1

    @property
    def version(self) -> int:
        """Updates made since the run began, those before a checkpoint among them."""
        return self.clocks.version

    # What replicas say.

    def begin(self, worker: int, step: int) -> list[Entry]:
        """A replica is at `step`, and what its shards hold before is void. When all have said so, and all shards are
        filled, it begins."""
        self._begun[worker] = step
        return self._begin()

    def _begin(self) -> list[Entry]:
        if not self.clocks.workers <= self._begun.keys() or len(self._filled) < self.holders:
            return []
        step, each = max(self._begun.values()), self.rule.updates_per_step
        self.clocks = Clocks(step * each, self.clocks.workers, final=self.schedule.steps - 1)
        self._begun, self._filled = {}, set()
        self._forget()
        self._highest = step - 1
        return [{"op": "begun", "step": step, "version": self.clocks.version}]

    def admit(self, worker: int) -> list[Entry]:
        """A replica comes to a run under way, and computes the step that the slowest one computes."""
        self.clocks.workers.add(worker)
        step = self.clocks.version // self.rule.updates_per_step
        return [{"op": "begun", "step": step, "worker": worker}]

    def ready(self, worker: int, step: int) -> list[Entry]:
        """A replica wants to read, to compute `step`."""
        self._reading[worker] = step
        entries = self._advance()
        self.tally.waits += worker in self._reading
        return entries

    def announce(self, worker: int, step: int, norm: float, stop: bool = False) -> list[Entry]:
        """A replica has computed its gradient for `step`. norm: of the whole model's. stop: it was asked to."""
        if stop and (self.clocks.final < 0 or self.clocks.final > self._highest + 1):
            self.clocks.final = self._highest + 1  # nobody has been told to compute it yet
        self._pushes.setdefault((worker, step), _Push()).norm = norm
        return self._arrive(worker, step)

    def gather(self, worker: int) -> list[Entry]:
        """A replica wants all weights, after what it has pushed; all get them together."""
        self._gathering.add(worker)
        return self._advance()

    def leave(self, worker: int) -> list[Entry]:
        """A replica has gone. What it has pushed for an update to come goes with it, and nobody waits for it."""
        self.clocks.workers.discard(worker)
        for pushed in self.clocks.pushed.values():
            pushed.pop(worker, None)
        self._pushes = {key: push for key, push in self._pushes.items() if key[0] != worker}
        self._arrived = deque(key for key in self._arrived if key[0] != worker)
        self._reading.pop(worker, None)
        self._gathering.discard(worker)
        if worker == self.speaker and self.clocks.workers:
            self.speaker = min(self.clocks.workers)
        if self._combining is not None and worker in self._combining[1]:
            self._combining, self._squares = (
                None,
                {},
            )  # the others' are pushed still, and make an update again
        return [{"op": "gone", "worker": worker}, *self._begin(), *self._advance()]

    # What shards say.

    def filled(self, shard: int) -> list[Entry]:
        """A shard has the weights and states that the run begins with."""
        self._filled.add(shard)
        return self._begin()

    def have(self, shard: int, worker: int, step: int) -> list[Entry]:
        """A shard has its part of a replica's gradient for `step`."""
        if worker not in self.clocks.workers:
            return []
        self._pushes.setdefault((worker, step), _Push()).at.add(shard)
        return self._arrive(worker, step)

    def square(self, shard: int, attempt: int, squared: float) -> list[Entry]:
        """A shard's part of the squared norm of the mean gradient that an entry `combine` has asked for."""
        if self._combining is None or self._attempt != attempt or shard >= self.shards:
            return []
        self._squares[shard] = squared
        if len(self._squares) < self.shards:
            return []
        norm = math.sqrt(math.fsum(self._squares.values())) if self._all_finite() else math.nan
        (_, pushers, rate), self._combining, self._squares = self._combining, None, {}
        return [*self._update(pushers, rate, norm), *self._advance()]

    def _all_finite(self) -> bool:
        return all(math.isfinite(x) for x in self._squares.values())

    # What follows.

    def _arrive(self, worker: int, step: int) -> list[Entry]:
        push = self._pushes[worker, step]
        if push.norm is None or len(push.at) < self.holders:
            return []
        self._norms[worker, step] = push.norm
        del self._pushes[worker, step]
        self._arrived.append((worker, step))
        return self._advance()

    def _advance(self) -> list[Entry]:
        """All that can happen now. While shards add up a gradient whose norm is needed, nothing can."""
        entries: list[Entry] = []
        while self._combining is None:
            if self.clocks.version in self.clocks.pushed and (due := self.rule.due(self.clocks)) is not None:
                entries += self._make(due)
            elif self._arrived:
                entries += self._take(*self._arrived.popleft())
            else:
                return [*entries, *self._read(), *self._gather()]
        return entries

    def _take(self, worker: int, step: int) -> list[Entry]:
        """A gradient that has arrived waits for its update, or is late."""
        fate, norm = self.rule.fate(self.clocks, worker, step), self._norms.pop((worker, step))
        self.tally.staleness[fate.staleness] += 1
        self.tally.late += fate.late
        following = self.clocks.version if fate.late else step + 1
        if not fate.late:
            self.clocks.pushed.setdefault(fate.step, {})[worker] = math.isfinite(norm)
            self._norms[worker, fate.step], self._stale[worker, fate.step] = norm, fate.staleness
        said = {
            "op": "took",
            "worker": worker,
            "step": step,
            "for": fate.step,
            "late": fate.late,
            "next": following,
        }
        return [{**said, "tally": self.tally.take()} if worker == self.speaker else said]

    def _make(self, due: Iterable[int]) -> list[Entry]:
        """The next update, or what shards have to add up for it."""
        version = self.clocks.version
        good = [worker for worker in due if self.clocks.pushed[version][worker]]
        rate = self.rule.rate(max((self._stale[worker, version] for worker in good), default=0))
        if len(good) > 1 and self.schedule.max_norm:
            self._combining, self._attempt = (version, good, rate), self._attempt + 1
            return [{"op": "combine", "version": version, "workers": good, "attempt": self._attempt}]
        return self._update(good, rate, self._norms[good[0], version] if good else 0.0)

    def _update(self, workers: list[int], rate: float, norm: float) -> list[Entry]:
        """workers: whose gradients are in it; those that were pushed beside them are void. norm: of their mean."""
        version, limit = self.clocks.version, self.schedule.max_norm
        pushed = self.clocks.pushed.pop(version)
        used = workers if math.isfinite(norm) or not limit else []
        for worker in pushed:
            self._norms.pop((worker, version), None)
            self._stale.pop((worker, version), None)
        self.tally.updates += bool(used)
        self.tally.used += len(used)
        self.tally.refused += len(pushed) - len(used)
        self.clocks.version += 1
        divisor = (norm + 1e-6) / limit if limit and norm > limit else 1.0
        lr = self.schedule.rate(version // self.rule.updates_per_step) * rate
        return [{"op": "update", "version": version, "workers": used, "void": sorted(set(pushed) - set(used)),
                 "divisor": divisor, "lr": lr}]  # fmt: skip

    def _read(self) -> list[Entry]:
        entries: list[Entry] = []
        for worker, step in sorted(self._reading.items()):
            if self.rule.may_read(self.clocks, worker, step):
                del self._reading[worker]
                self.clocks.read[worker] = self.clocks.version
                self._highest = max(self._highest, step)
                self.rule.begun(self.clocks, worker, step)
                said = {"op": "read", "worker": worker, "version": self.clocks.version}
                entries.append({**said, "final": self.clocks.final})
        return entries

    def _gather(self) -> list[Entry]:
        if not self._gathering or self._gathering < self.clocks.workers:
            return []
        self._gathering = set()
        return [{"op": "gather", "version": self.clocks.version}]
