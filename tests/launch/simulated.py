"""A world around the state machine: hosts and workers that do what they are told, and are lost as a generator draws.

Time is simulated, so that ten thousand runs take seconds.
"""

import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from unisono.launch.rank_status import RankStatus
from unisono.launch.run import commands, events
from unisono.launch.run.machine import handle
from unisono.launch.run.membership import Role, RunSpread
from unisono.launch.run.state import Phase, RunState, RunTerms, begin

KILLED = -signal.SIGKILL
ECHO = {"kind": "UserCodeError", "what": "gone", "where": "", "likely": "", "fix": "", "code": "R03", "rank": None,
        "host": "", "shown": "", "trace": "", "shared": False, "echo": True}  # fmt: skip
RAISED = {**ECHO, "what": "ValueError", "where": "a.py:3", "code": "R01", "echo": False}


@dataclass
class World:
    """What lives, what is under way, and what the machine has asked for."""

    state: RunState
    now: float = 0.0
    spawned: set[int] = field(default_factory=set)
    killed: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    epochs: list[int] = field(default_factory=list)
    shown: list[dict[str, Any]] = field(default_factory=list)
    told: list[tuple[int, str]] = field(default_factory=list)
    asked: list[commands.Command] = field(default_factory=list)
    due: list[events.Event] = field(default_factory=list)

    def feed(self, event: events.Event) -> list[commands.Command]:
        """Let the machine hear an event, and hold its answer to what must always be so."""
        before = self.state
        self.state, done = handle(before, event, self.now)
        for command in done:
            self._note(command)
        self.asked += done
        self._check(before)
        return done

    def _note(self, command: commands.Command) -> None:
        match command:
            case commands.Spawn(worker=worker):
                assert worker not in self.spawned, "numbers are used once"
                self.spawned.add(worker)
                self.due.append(events.Born(worker))
            case commands.Kill(worker=worker):
                self.killed.add(worker)
                self.due.append(events.Exited(worker, KILLED))
            case commands.Regroup(epoch=epoch):
                assert epoch not in self.epochs, "two meetings of one epoch"
                self.epochs.append(epoch)
            case commands.Show(event=event):
                self.shown.append(dict(event))
            case commands.Tell(worker=worker, word=word):
                self.told.append((worker, word))
            case commands.OnHost(verb="start"):
                self.due.append(events.HostUp(0, "here", 4))
            case commands.ReadStacks(workers=workers):
                self.due.append(
                    events.StacksRead(tuple(RankStatus(n, "runs", place="m.py:3 in f") for n in workers))
                )
            case _:
                pass

    def _check(self, before: RunState) -> None:
        state = self.state
        assert state.epoch >= before.epoch, "epochs only grow"
        assert before.phase is not Phase.OVER or state.phase is Phase.OVER, "over is over"
        if state.phase is Phase.OVER:
            alive = {n for n, one in state.workers.items() if one.status is None}
            assert alive <= self.killed, "after the end each worker has its exit or its kill"
            assert self.spawned - set(state.workers) - self.ended == set()
            return
        places = [one.place for one in (*state.members(), *(state.workers[n] for n in state.beside))
                  if one.status is None]  # fmt: skip
        assert len(set(places)) == len(places), "two workers in one place"
        if state.phase is not Phase.WAITING:
            assert [one.rank for one in state.members()] == list(range(state.spread.ranks))
            born = [one for one in state.unfinished() if one.born]
            assert state.next_deadline() is not None or not born, "no phase without a deadline"

    def turn(self) -> None:
        """What is under way happens, in its order."""
        due, self.due = self.due, []
        for event in due:
            self.happen(event)

    def happen(self, event: events.Event) -> None:
        if isinstance(event, events.Exited):
            if event.worker in self.ended:
                return
            self.ended.add(event.worker)
        if isinstance(event, events.Born) and event.worker in self.ended:
            return
        if isinstance(event, events.HostDown | events.HostUp) and event.host in self.state.hosts:
            self.ended |= {n for n, one in self.state.workers.items() if one.host == event.host}
        if isinstance(event, events.HostFailed):  # what it has not forked will never live
            unborn = {n for n, one in self.state.workers.items() if one.host == event.host and not one.born}
            self.ended |= unborn & ({event.worker} if event.worker is not None else unborn)
        self.feed(event)

    def wait(self) -> None:
        """Time goes on to what the machine wants to hear of next."""
        at = self.state.next_deadline()
        self.now = max(self.now + 0.01, self.now if at is None else at)
        self.feed(events.Tick())

    def alive(self) -> list[int]:
        return sorted(self.spawned - self.ended)

    def settle(self, most: int = 400) -> bool:
        """Let all that is due happen; whether the run is over, or waits for workers that train."""
        for _ in range(most):
            if self.state.is_done() or not (self.due or self.state.next_deadline() is not None):
                return True
            self.turn() if self.due else self.wait()
        return self.state.is_done()


def started(ranks: int = 4, room: int = 4, beside: tuple[Role, ...] = (), **terms: Any) -> World:
    """A run on one host, whose workers have just been asked for."""
    spread = RunSpread("dp", ranks, roles=(Role.TRAINER,) * ranks + beside if beside else ())
    world = World(begin(RunTerms("here", spread, **terms)))
    world.feed(events.HostUp(0, "here", room))
    return world


def trained(ranks: int = 4, room: int = 4, beside: tuple[Role, ...] = (), **terms: Any) -> World:
    """The same, once all train."""
    world = started(ranks, room, beside, **terms)
    world.turn()
    ready(world)
    return world


def ready(world: World, step: int = 0) -> None:
    """All members of the group that live say that they train."""
    for one in world.state.members():
        if one.is_at_work and one.born:
            world.feed(events.Ready(one.number, step))


def drawn(order: random.Random, world: World) -> Iterator[events.Event]:
    """Any event, of workers that there are or were."""
    while True:
        workers = sorted(world.state.workers) or [1]
        living = [n for n in world.alive() if n in world.state.workers] or [99]
        yield _any(order, order.choice([*workers, 99]), order.choice(living), world.state.epoch)


def _any(order: random.Random, worker: int, living: int, epoch: int) -> events.Event:
    epoch -= order.choice((0, 0, 1))
    stands = {**RAISED, "kind": "HangError", "code": "H01", "rank": order.randint(0, 5)}
    return order.choice((
        lambda: events.Exited(living, order.choice((KILLED, KILLED, 1, 0))),
        lambda: events.Exited(living, KILLED),
        lambda: events.Frozen(worker, order.random() < 0.7),
        lambda: events.Ready(worker, 3),
        lambda: events.Stepped(worker, order.randint(0, 20), silence=order.choice((None, 30.0))),
        lambda: events.Said(worker, {"kind": "settled", "argument": {"plan": "dp"}}),
        lambda: events.Said(worker, {"kind": "start", "backend": order.choice(("gloo", "nccl"))}),
        lambda: events.Finished(worker, {"x": 1}),
        lambda: events.Failed(worker, order.choice((ECHO, RAISED))),
        lambda: events.Missed(worker, epoch),
        lambda: events.FoundHang(worker, stands, epoch),
        lambda: events.WorkerPaused(worker, epoch),
        lambda: events.Signalled(order.choice(("interrupt", "terminate")), worker),
        lambda: events.Drained(worker, "saved"),
        lambda: events.Said(worker, {"kind": "note", "text": "x"}),
        lambda: events.HostUp(order.randint(0, 2), "b", order.randint(1, 3)),
        lambda: events.HostPrepared(order.randint(0, 2)),
        lambda: events.HostDown(order.choice((0, 1, 1, 2, 2)), "killed by SIGKILL"),
        lambda: events.HostFailed(order.randint(0, 2), RAISED, order.choice((None, worker))),
        lambda: events.Signalled(order.choice(("interrupt", "terminate"))),
        lambda: events.Advised(RunSpread("other", order.randint(1, 6)), "why"),
        lambda: order.choice((events.Resumed(), events.Resumed(), events.Abandoned())),
        lambda: events.Tick(),
    ))()  # fmt: skip
