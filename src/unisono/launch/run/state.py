"""What is known of a run: hosts, workers, epoch, phase, and what is due when. Frozen values; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from unisono.launch.error_record import Record
from unisono.launch.run.commands import Command, Kill
from unisono.launch.run.membership import Choice, Place, Role, RunSpread, Tries
from unisono.launch.run.verdict import Failure
from unisono.spec.errors import UnisonoError

STOPPED = 0.4
"""Seconds for which a worker may be stopped by a signal before it counts as lost."""
LEAVE = 60.0
"""Seconds that workers have to end after all have reported how they ended."""


class Phase(StrEnum):
    """WAITING: for hosts with enough room. MEETING: workers of an epoch look for each other. RUNNING: all train.
    STOPPING: they were asked to end with their step. OVER: nothing is decided any more; what lives is being killed."""

    WAITING = "waiting"
    MEETING = "meeting"
    RUNNING = "running"
    STOPPING = "stopping"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class RunTerms:
    """What is fixed for a run. host: the name of the supervisor's own. spread: that the run begins with. choice: how it
    goes on with other room. recovers: replaces workers that are lost. grace: seconds from a SIGTERM to the end, None
    for any number. silence: seconds that a worker may say nothing before the pace is known."""

    host: str
    spread: RunSpread
    choice: Choice | None = None
    recovers: bool = False
    grace: float | None = None
    silence: float = 300.0


@dataclass(frozen=True, slots=True)
class Host:
    """room: how many workers it takes."""

    name: str
    room: int


@dataclass(frozen=True, slots=True)
class Worker:
    """number: unique in a run. rank: in the present epoch. host, index: where it is. heard: when it last said
    something. status: exit status (negative: signal), None while it lives. killed: it was sent SIGKILL. frozen: since
    when a signal has stopped it. paused: the epoch in which it has ended its step, to meet anew. seat: of one beside
    the ranks, its number among these, by which it is called as long as it lives.
    """

    number: int
    rank: int
    host: int
    index: int
    heard: float
    role: Role = Role.TRAINER
    born: bool = False
    status: int | None = None
    killed: bool = False
    frozen: float | None = None
    paused: int = -1
    seat: int = 0
    finished: bool = False
    result: dict[str, Any] | None = None
    record: Record | None = None

    @property
    def place(self) -> Place:
        return self.host, self.index

    @property
    def has_reported(self) -> bool:
        """Whether it has said how it ended."""
        return self.finished or self.record is not None

    @property
    def is_at_work(self) -> bool:
        """Whether it lives and has more to do."""
        return self.status is None and not self.killed and not self.has_reported


@dataclass(frozen=True, slots=True)
class RunState:
    """hosts, workers: by number; a worker that has ended stays known as long as it has a place. group: the workers of
    the ranks, in order. beside: workers of other roles. leaving: those that only hand over what they hold. has_trained:
    all workers of the group have, since they were started together, so that those that are left hold the run. ready:
    ranks that train in this epoch. losses: changes of members that were not planned. settled: what workers agreed on at
    their start. advised: better spreads, by room. move: the spread to which all move after their step. verdict_at,
    grace_at, leave_at: when that is due."""

    terms: RunTerms
    spread: RunSpread
    silence: float
    hosts: Mapping[int, Host] = field(default_factory=dict)
    workers: Mapping[int, Worker] = field(default_factory=dict)
    group: tuple[int, ...] = ()
    beside: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()
    count: int = 0
    epoch: int = 0
    phase: Phase = Phase.WAITING
    has_trained: bool = False
    ready: frozenset[int] = frozenset()
    tries: Tries = field(default_factory=Tries)
    losses: int = 0
    settled: Mapping[str, Any] = field(default_factory=dict)
    advised: Mapping[int, RunSpread] = field(default_factory=dict)
    move: RunSpread | None = None
    is_on_gpus: bool = False
    gone: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    stopping: str = ""
    failures: tuple[Failure, ...] = ()
    is_hung: bool = False
    error: UnisonoError | None = None
    verdict_at: float | None = None
    grace_at: float | None = None
    leave_at: float | None = None

    @property
    def room(self) -> dict[int, int]:
        """Places of each host."""
        return {number: host.room for number, host in self.hosts.items()}

    def members(self) -> list[Worker]:
        """The group, in the order of ranks."""
        return [self.workers[number] for number in self.group]

    def everyone(self) -> list[Worker]:
        """All that have a part in the run."""
        return [self.workers[number] for number in (*self.group, *self.beside, *self.leaving)]

    def unfinished(self) -> list[Worker]:
        """Workers of the group that live and have more to do."""
        return [worker for worker in self.members() if worker.status is None and not worker.has_reported]

    def is_done(self) -> bool:
        """Whether the run is over and nobody lives."""
        return self.phase is Phase.OVER and all(worker.status is not None for worker in self.workers.values())

    def next_spread(self) -> RunSpread | None:
        """How to go on with the hosts that are there; None where that is not known."""
        room = sum(self.room.values())
        spread = self.advised.get(room)
        if spread is None and self.terms.choice is not None:
            spread = self.terms.choice(room, self.settled.get("plan", ""))
        elif spread is None:
            spread = self.spread
        return spread if spread is not None and spread.ranks <= room else None

    def is_advised(self, spread: RunSpread) -> bool:
        """Whether it is one that turned out to be better, so that nobody has to think about it again."""
        return replace(spread, why="") in self.advised.values()

    def can_recover(self) -> bool:
        """Whether a loss can be made good: one more try is worth it, and there is room."""
        return (
            self.terms.recovers
            and self.phase is not Phase.OVER
            and all(failure.echo for failure in self.failures)
            and self.tries.may()
            and self.next_spread() is not None
        )

    def silence_at(self) -> float | None:
        """When the worker that has said nothing for longest is taken for hung."""
        if self.is_hung or self.phase is Phase.OVER:
            return None
        heard = [worker.heard for worker in self.unfinished() if worker.born]
        return min(heard) + self.silence if heard else None

    def frozen_at(self, worker: Worker) -> float | None:
        """When a worker that a signal has stopped counts as lost."""
        if worker.frozen is None or not worker.is_at_work or not self.terms.recovers:
            return None
        return worker.frozen + STOPPED

    def next_deadline(self) -> float | None:
        """When the machine next wants to hear of the time; None for not at all."""
        if self.phase is Phase.OVER:
            return None
        frozen = [self.frozen_at(worker) for worker in self.members()]
        due = [self.verdict_at, self.grace_at, self.leave_at, self.silence_at(), *frozen]
        return min((at for at in due if at is not None), default=None)


def begin(terms: RunTerms, count: int = 0, epoch: int = 0) -> RunState:
    """A run whose hosts are still to come. count: workers of earlier runs, whose numbers are not used again."""
    return RunState(terms, terms.spread, terms.silence, count=count, epoch=epoch)


@dataclass
class Turn:
    """One call of the machine: the state as it changes, and the commands that follow."""

    state: RunState
    now: float
    commands: list[Command] = field(default_factory=list)

    def set(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    def change(self, number: int, **changes: Any) -> Worker:
        """Change what is known of a worker; returns it."""
        worker = replace(self.state.workers[number], **changes)
        self.set(workers={**self.state.workers, number: worker})
        return worker

    def do(self, *commands: Command) -> None:
        self.commands += commands

    def kill(self, worker: Worker) -> None:
        """End a worker; one that is not born yet, as soon as it is."""
        if worker.status is None and not worker.killed:
            self.change(worker.number, killed=True)
            self.do(Kill(worker.number))

    def drop(self) -> None:
        """Forget workers that have ended and have no part in the run any more."""
        part = {worker.number for worker in self.state.everyone()}
        kept = {n: other for n, other in self.state.workers.items() if n in part or other.status is None}
        self.set(workers=kept)
