"""The supervisor's loop: one thread, one selector. It turns bytes into events for the state machine (`run.machine`),
and commands into bytes. No torch.

`run` ends when every worker is gone; whatever happens here, none of them stays.
"""

import contextlib
import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from unisono.launch import wire
from unisono.launch.background_replanner import BackgroundReplanner
from unisono.launch.inspect_server import InspectServer
from unisono.launch.local_host import LocalHost, Message, WorkerHost
from unisono.launch.outcome import Outcome, ended
from unisono.launch.pace import StepPace
from unisono.launch.rank_status import PRINT, RankStatus, from_dump
from unisono.launch.remote_hosts import RemoteHosts
from unisono.launch.run import commands, events
from unisono.launch.run.machine import handle
from unisono.launch.run.membership import Role
from unisono.launch.run.state import Phase, RunState
from unisono.launch.signals import Signals, meant
from unisono.launch.store import StoreServer
from unisono.launch.worker_handle import WorkerHandle, line_pairs

OnEvent = Callable[[int, dict[str, Any]], None]
AGAIN = 0.05
"""Seconds after which a worker that did not read what it was told is told again."""
SUSPENDED = 5.0
"""Seconds later than asked for, after which a turn comes out of a stop of the whole run (Ctrl-Z)."""


class _File(Protocol):
    def fileno(self) -> int: ...


@dataclass
class EventLoop:
    """One run. on_event(rank, event): hears what workers report and print, and as rank -1 what becomes of the run.
    terms, argument: what each host is told of the run. local: the supervisor's own host; start_local() starts it anew.
    threads: of a worker; its share of its host's cores if None."""

    state: RunState
    on_event: OnEvent
    pace: StepPace
    terms: dict[str, Any]
    argument: dict[str, Any]
    local: LocalHost
    start_local: Callable[[], LocalHost]
    threads: int | None = None
    remote: RemoteHosts | None = None
    replanner: BackgroundReplanner | None = None
    store: StoreServer = field(default_factory=StoreServer)
    hosts: dict[int, WorkerHost] = field(default_factory=dict)
    workers: dict[int, WorkerHandle] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)
    _queue: deque[events.Event] = field(default_factory=deque)
    _is_feeding: bool = False
    _broken: BaseException | None = None
    _inspector: InspectServer = field(default_factory=InspectServer)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def run(self, signals: Signals) -> Outcome:
        """Start the workers, serve and watch them until all are gone."""
        self._watch(signals, lambda: self._signalled(signals))
        self._watch(self._inspector, lambda: self._inspector.turn(self._by_rank()))
        if self.remote is not None:
            self._watch(self.remote.listener, self._receive_hosts)
        if self.replanner is not None:
            self._watch(self.replanner, self._advised)
        try:
            self._join(0, self.local)
            while not self.state.is_done():
                self._turn()
        finally:
            self._end()
        if self._broken is not None:
            raise self._broken
        members, ranks = self.state.members(), self.state.spread.ranks
        results = [worker.result for worker in members] + [None] * (ranks - len(members))
        return ended(results, self.state.error, self.state.stopping, self.state.losses)

    def _end(self) -> None:
        """Nobody is left behind, after an error of our own too."""
        self.on_event = lambda rank, event: None
        self.feed(events.Abandoned())
        while not self.state.is_done():
            self._turn()
        for number, host in list(self.hosts.items()):
            self._forget(host)
            if number:
                host.send({"op": "end"})
                host.close()
        for number in list(self.workers):
            self._close_lines(number)
        self._inspector.close()
        self._selector.close()

    def _turn(self) -> None:
        """Wait for what comes or is due, and take it in."""
        patience, begun = self._patience(), time.monotonic()
        ready = self._selector.select(patience)
        if patience is not None and time.monotonic() - begun > patience + SUSPENDED:
            self.feed(events.Resumed())
        for key, _ in ready:
            if self._is_watched(key):  # no earlier one of these has ended this line
                key.data()
        for number, host in list(self.hosts.items()):
            if self.hosts.get(number) is host:
                self._poll(number, host)
        self._reply(self.store.expire())
        if self.remote is not None:
            self.remote.listener.expire()
            if self.state.phase is Phase.WAITING:
                missing = self.remote.missing((host.name for host in self.hosts.values()), time.monotonic())
                if missing is not None:
                    self.feed(events.HostsMissing(missing))
        self.feed(events.Tick())

    def _patience(self) -> float | None:
        """Seconds until something is due, None for never."""
        due = [self.state.next_deadline(), self.store.next_deadline()]
        due += [host.next_poll() for host in self.hosts.values()]
        if self.remote is not None:
            due.append(self.remote.next_deadline(self.state.phase is not Phase.WAITING))
        now = time.monotonic()
        if [worker for worker in self.workers.values() if worker.to_events and worker.send_words()]:
            due.append(now + AGAIN)  # one does not read now
        times = [at for at in due if at is not None]
        return max(0.0, min(times) - now) if times else None

    # Events.

    def feed(self, event: events.Event) -> None:
        """Let the machine hear an event, and play its commands; what these lead to comes after them."""
        self._queue.append(event)
        if self._is_feeding:
            return
        self._is_feeding = True
        try:
            while self._queue:
                event, before = self._queue.popleft(), self.state
                self.state, orders = handle(before, event, time.monotonic())
                for command in orders:
                    self._play(command)
                if self.replanner is not None:
                    self.replanner.heard(before, self.state, event, self.hosts)
        finally:
            self._is_feeding = False

    def _poll(self, number: int, host: WorkerHost) -> None:
        for report in host.poll():
            if report["op"] == "exit" and report["worker"] in self.workers:
                self.feed(
                    events.Exited(report["worker"], report["status"], self._last_words(report["worker"]))
                )
            elif (event := events.from_host(number, report)) is not None:
                self.feed(event)
            else:
                self._show(-1, {"kind": report["op"], **report})

    def _hear(self, worker: WorkerHandle) -> bool:
        """Take in some of what a worker says; False when nothing lies there."""
        heard = worker.read_events()
        for event in heard or ():
            if self._inspector.heard(worker, event, self._by_rank()):
                continue
            silence = None
            if event["kind"] == "step" and self._rank(worker.number) == 0:
                self.pace.stepped(event["step"])
                silence = self.pace.silence()
            self.feed(events.from_worker(worker.number, event, silence))
        return heard is not None

    def _last_words(self, number: int) -> str:
        """A worker is gone: what it has said may still lie in its lines. Returns the line in which it was."""
        worker = self.workers[number]
        while self._hear(worker):
            pass
        if number not in self.workers:
            return ""
        self._relay(worker, last=True)
        for sock in (worker.events, worker.store):
            self._forget(sock)
        return from_dump(0, list(worker.lines)).place

    def _signalled(self, signals: Signals) -> None:
        for number in signals.take():
            self.feed(events.Signalled(meant(number)))

    def _advised(self) -> None:
        advice = self.replanner.answer() if self.replanner is not None else None
        if advice is not None:
            self.feed(events.Advised(advice.spread, advice.says))

    def _receive_hosts(self) -> None:
        """Hosts that come, the first time or again."""
        for host in self.remote.listener.turn() if self.remote is not None else ():
            number = self._numbers.setdefault(host.name, len(self._numbers) + 1)
            if number in self.hosts:  # it has noticed sooner than we have
                self.feed(events.HostDown(number))
            self._join(number, host)

    def _join(self, number: int, host: WorkerHost) -> None:
        self.hosts[number] = host
        self._watch(host, lambda: None)  # each turn polls all hosts
        self.feed(events.HostUp(number, host.name, host.room, host.address))

    # Commands.

    def _play(self, command: commands.Command) -> None:
        match command:
            case commands.Show(rank=rank, event=event):
                self._show(rank, dict(event))
            case commands.Tell(worker=worker, word=word):
                if worker in self.workers:
                    self.workers[worker].tell(word)
            case commands.Regroup(calls=calls):
                self.store.meet()
                for worker, meeting in calls.items():
                    self.workers[worker].tell("regroup", **meeting.as_json())
            case commands.Spawn():
                self._spawn(command)
            case commands.Kill(worker=worker):
                self._kill(worker, signal.SIGKILL)
            case commands.Forget(worker=worker):
                self._close_lines(worker)
            case commands.AskStacks(workers=workers):
                for worker in workers:
                    self.workers[worker].lines.clear()
                    self._kill(worker, PRINT)  # faulthandler writes the stack to the worker's output
            case commands.ReadStacks(workers=workers):
                self.feed(events.StacksRead(tuple(map(self._stand, workers))))
            case commands.OnHost(host=number, verb="start"):
                if self.remote is not None:
                    self.remote.wait()
                self.local = self.start_local()
                self._join(number, self.local)
            case commands.OnHost(host=number, verb=verb):
                if number in self.hosts:
                    self._on_host(number, self.hosts[number], verb)

    def _on_host(self, number: int, host: WorkerHost, verb: commands.HostVerb) -> None:
        if verb == "prepare":
            threads = self.threads or max(1, host.cores // max(1, host.room))
            leads = self.remote.listener.address if self.remote is not None else ""
            terms = {**self.terms, "threads": threads, "room": host.room, "leads": leads}
            host.send({"op": "run", "argument": self.argument, **terms})
        elif verb == "close":
            self._forget(self.hosts.pop(number))
            if number:
                host.close()
        else:
            host.send({"op": verb})

    def _spawn(self, command: commands.Spawn) -> None:
        """A new worker, whose ends of its lines go to its host with the order to fork it."""
        ours, theirs = line_pairs()
        self.workers[command.worker] = worker = WorkerHandle(command.worker, *ours)
        self._watch(worker.events, lambda: self._hear(worker))
        self._watch(worker.store, lambda: self._serve(worker))
        self._watch(worker.output, lambda: self._relay(worker))
        order: Message = {
            **command.meeting.as_json(), "op": "spawn", "worker": command.worker, "index": command.index,
            "joins": command.joins, "settled": dict(command.settled),
        }  # fmt: skip
        if command.role is not Role.TRAINER:
            order["role"] = command.role
        if (host := self.hosts.get(command.host)) is not None:
            host.send(order, theirs)
        for fd in theirs:
            os.close(fd)

    def _kill(self, worker: int, number: int) -> None:
        host = self.hosts.get(self.state.workers[worker].host)
        if host is not None:
            host.send({"op": "kill", "worker": worker, "signal": int(number)})

    def _stand(self, number: int) -> RankStatus:
        """What a worker wrote when it was asked where it is; where it wrote nothing, what the kernel says."""
        worker, name = self.state.workers[number], ""
        if worker.host in self.hosts:
            name = self.hosts[worker.host].name
        seen = from_dump(worker.rank, list(self.workers[number].lines), host=name)
        is_stopped = seen.state == "silent" and worker.frozen is not None
        return RankStatus(worker.rank, "stopped", name) if is_stopped else seen

    def _show(self, rank: int, event: dict[str, Any]) -> None:
        """An error of the listener ends the run, after its workers."""
        try:
            self.on_event(rank, event)
        except BaseException as error:
            self._broken, self.on_event = self._broken or error, lambda rank, event: None
            self.feed(events.Abandoned())

    # Lines of workers.

    def _watch(self, file: "_File | int", do: Callable[[], object]) -> None:
        """Call `do` whenever the file can be read."""
        self._selector.register(file, selectors.EVENT_READ, do)

    def _is_watched(self, key: selectors.SelectorKey) -> bool:
        with contextlib.suppress(KeyError, ValueError):
            return self._selector.get_key(key.fileobj).data is key.data
        return False

    def _forget(self, file: "_File | int") -> None:
        """No longer; harmless when repeated."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(file)

    def _by_rank(self) -> dict[int, WorkerHandle]:
        return {
            rank: self.workers[number]
            for rank, number in enumerate(self.state.group)
            if number in self.workers
        }

    def _rank(self, number: int) -> int:
        worker = self.state.workers.get(number)
        return worker.rank if worker is not None else -1

    def _close_lines(self, number: int) -> None:
        if (worker := self.workers.pop(number, None)) is not None:
            for file in (worker.events, worker.store, worker.output):
                self._forget(file)
            self.store.leave(number)
            worker.close()

    def _serve(self, worker: WorkerHandle) -> None:
        for request in worker.read_requests():
            self._reply(self.store.handle(worker.number, request))
        self._send_answers(worker)

    def _reply(self, answers: Iterable[tuple[int, list[bytes]]]) -> None:
        for number, fields in answers:
            if (worker := self.workers.get(number)) is not None:
                worker.to_store += wire.frame(wire.join(fields))
                self._send_answers(worker)

    def _send_answers(self, worker: WorkerHandle) -> None:
        """Answers of the store, as many as a worker takes; the rest when it reads on, so that nobody waits."""
        waits = selectors.EVENT_WRITE if worker.send_answers() else 0
        with contextlib.suppress(KeyError, ValueError):  # it is gone
            key = self._selector.get_key(worker.store)
            if key.events != selectors.EVENT_READ | waits:
                self._selector.modify(worker.store, selectors.EVENT_READ | waits, key.data)

    def _relay(self, worker: WorkerHandle, last: bool = False) -> None:
        lines, more = worker.read_output(last)
        for line in lines:
            if not self.state.is_hung:
                self._show(self._rank(worker.number), {"kind": "output", "text": line})
        if last or not more:
            self._forget(worker.output)
