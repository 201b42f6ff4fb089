"""Watching one run: one thread, one selector, every rank's store, events, output and death. No torch.

The loop ends when every rank is gone. Ranks that finish wait for each other before they leave; when one fails, the
first true failure is found among the echoes it causes, and the rest are killed. Killing outright is safe because
nothing in a run folder is written in place, and quick because a rank inside a collective hears no milder signal.
"""

import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from unisono.launch import crossing, verdict
from unisono.launch.advice import Adviser
from unisono.launch.changes import Changes, OnEvent
from unisono.launch.company import Company
from unisono.launch.crew import Crew
from unisono.launch.far_host import BEAT
from unisono.launch.hosts import Message, RankHost
from unisono.launch.inspect_server import InspectServer
from unisono.launch.outcome import Outcome, ended, helper_killed, host_gone
from unisono.launch.pace import StepPace
from unisono.launch.rank_status import PRINT
from unisono.launch.recovery import ALIKE_GRACE, CUT_GRACE, ECHO_GRACE, STACK_GRACE, Recovery
from unisono.launch.seats import Seat
from unisono.launch.signals import Signals, meant
from unisono.launch.switchboard import Switchboard
from unisono.spec.errors import Interrupted, Stopped, UnisonoError, out_of_grace


@dataclass
class Supervision:
    """State of one run. pace: how long ranks may be silent. grace: within how many seconds of a SIGTERM they are gone.
    recovery: where ranks that are lost are replaced. company: other hosts. adviser: whom to ask for a better spread."""

    on_event: OnEvent
    pace: StepPace
    host: str
    recovery: Recovery | None = None
    grace: float | None = None
    company: Company | None = None
    adviser: Adviser | None = None
    failures: list[verdict.Failure] = field(default_factory=list)
    stopped: str = ""
    unborn: crossing.Record | None = None
    hung: bool = False
    _begun: bool = False
    _helper_gone: bool = False
    _judged: UnisonoError | None = None
    _ending: bool = False
    _deadline: float | None = None
    _grace_ends: float | None = None

    def __post_init__(self) -> None:
        self.board = Switchboard(self._heard, self._printed)
        self.inspector = InspectServer()
        self.changes: Changes | None = None

    def watch(self, crew: Crew, signals: Signals) -> Outcome:
        """Start the ranks, serve and watch them until all are gone; whatever happens here, none of them stays."""
        self.crew = crew
        self.board.watch(signals, lambda: self._signalled(signals))
        self.board.watch(self.inspector, lambda: self.inspector.turn(crew.by_rank()))
        for number, host in crew.hosts.items():
            self._join(number, host)
        if self.company is not None:
            self.board.watch(self.company.reception, self._receive)
        if self.recovery is not None:
            tell = lambda event: self.on_event(-1, event)
            self.changes = changes = Changes(crew, self.recovery, tell, self.adviser)
            if self.adviser is not None:
                self.board.watch(self.adviser, changes.advised)
        try:
            self._begin()
            while not self._over():
                self.board.turn(self._patience())
                self._mind_the_time()
            return self._outcome()
        finally:
            self.on_event = lambda rank, event: None
            self._take_down()
            while not self._over():  # an error of our own: still nobody is left behind
                self.board.turn(None)
            for host in crew.hosts.values():
                self.board.forget(host)
                if host.far and not self._helper_gone:  # else another helper follows, and it comes again
                    host.abandon()
                host.close()
            self.inspector.close()
            self.board.close()

    def _join(self, number: int, host: RankHost) -> None:
        """A host is there: its helper is heard, and reads the data."""
        self.board.watch(host, lambda: self._hear_helper(number, host))
        with suppress(OSError):  # where its helper has gone, that is found where it is heard
            self.crew.prepare(host)

    def _receive(self) -> None:
        """Hosts that come, the first time or again."""
        for host in self.company.reception.turn() if self.company is not None else ():
            number = self.crew.number_of(host.name)
            if number in self.crew.hosts:
                self._host_lost(number)  # it has noticed sooner than we have
            self.crew.hosts[number] = host
            if self._begun and self.changes is not None:
                self.changes.host("joined", host.name)
            self.on_event(-1, {"kind": "host", "came": host.name, "room": host.room, "address": host.address})
            self._join(number, host)
        self._begin()

    def _begin(self) -> None:
        """Ask for the ranks, once there are room for all of them."""
        if not self._begun and sum(self.crew.room.values()) >= self.crew.spread.ranks:
            self._begun = True
            with suppress(OSError):  # as above
                self.crew.begin(self.recovery.epoch if self.recovery is not None else 0)

    def _over(self) -> bool:
        if self.unborn is not None:
            return True
        if self._helper_gone:  # its ranks die with it; the kernel says when
            for seat in self.crew.everyone():
                if seat.status is None and seat.process is not None:
                    seat.process.ended()
                    seat.status = -signal.SIGKILL
            return True
        if not self._begun:
            return self._ending
        whole = len(self.crew.seats) == self.crew.spread.ranks
        return whole and all(seat.status is not None for seat in self.crew.everyone())

    def _hear_helper(self, number: int, host: RankHost) -> None:
        said = host.hear()
        if said is None:
            self.board.forget(host)
            if number == 0:
                self._helper_gone = True
            else:
                self._host_lost(number)
            return
        for message, files in said:
            self._obey_helper(number, host, message, files)

    def _obey_helper(self, number: int, host: RankHost, message: Message, files: Sequence[int]) -> None:
        match message["op"]:
            case "born":
                process, seat = host.process(message, files), self.crew.seat(message["seat"])
                if seat is None or self._ending:
                    process.kill(signal.SIGKILL)
                if seat is None:
                    process.close()
                    return
                seat.process, seat.heard = process, time.monotonic()
            case "exit":
                seat = self.crew.seat(message["seat"])
                if seat is not None and seat.status is None:  # else one whose place is taken already
                    self._buried(seat, message["status"])
            case "failed":
                self.unborn = message["error"]
            case "prepared":
                host.prepared = True
                host.probe()
                if self._begun and self.changes is not None:
                    self.changes.grow()
            case op:
                self.on_event(-1, {"kind": op, **message})

    def _heard(self, seat: Seat, event: dict[str, Any]) -> None:
        if self.inspector.heard(seat, event, self.crew.by_rank()):
            return
        seat.heard = time.monotonic()
        match event.get("kind"):
            case "result":
                seat.finished, seat.result = True, event["value"]
                self._let_go()
            case "error":
                seat.error = event["error"]
                self._failed(verdict.Failure(seat.rank, seat.error))
                self._let_go()
            case "asked":
                self._stop(event["how"])
            case "drained":
                if seat.rank == 0:  # whose part comes last
                    self._judge(Stopped(event["text"]))
            case "hang":
                self._hung(crossing.revive(event["error"], None, self.host), event["epoch"])
            case "lost":
                self._missed(event["epoch"])
            case "paused":
                if self.changes is not None and self.changes.paused(seat, event["epoch"]):
                    self._lose([])
            case kind:
                self._train(seat, kind, event)
                self.on_event(seat.rank, event)

    def _printed(self, seat: Seat, line: str) -> None:
        if not self.hung:
            self.on_event(seat.rank, {"kind": "output", "text": line})

    def _let_go(self) -> None:
        """Ranks that only handed over what they held leave as soon as they have; the others together."""
        for seat in self.crew.leaving:
            if seat.reported():
                seat.tell("leave")
        if all(seat.reported() for seat in self.crew.seats):
            for seat in self.crew.seats:
                seat.tell("leave")

    def _buried(self, seat: Seat, status: int) -> None:
        """A rank is gone: hear its last words first, they may still lie in the sockets."""
        seat.status = status
        self.board.last_words(seat)
        if not seat.reported() and not self._ending:
            failure = verdict.Failure(seat.rank, None, status)
            if self.recovery is not None and self.crew.seats[0].finished:
                seat.finished = True  # all is done and said
                self._let_go()
            elif self._replaceable(status):
                self._lose([failure])
            else:
                self._failed(failure)

    def _host_lost(self, number: int) -> None:
        """A host, and all ranks there at once."""
        host = self.crew.hosts[number]
        self.board.forget(host)
        lost = [seat for seat in self.crew.host_gone(number) if seat in self.crew.seats]
        host.close()
        if self.changes is not None:
            self.changes.host("gone", host.name)
        self.on_event(-1, {"kind": "host", "gone": host.name})
        if not lost or self._ending or not self._begun:
            return
        if self._replaceable(-signal.SIGKILL):
            failures = [verdict.Failure(seat.rank, None, -signal.SIGKILL) for seat in lost]
            self._lose(failures, f"host {host.name} is gone")
        else:
            self._judge(host_gone(host.name, [seat.rank for seat in lost], sum(self.crew.room.values())))

    def _signalled(self, signals: Signals) -> None:
        for number in signals.take():
            twice, how = self.stopped == "interrupt" and number == signal.SIGINT, meant(number)
            if not self._begun or not all(seat.process is not None for seat in self.crew.seats):
                self.stopped, kind = how, Interrupted if number == signal.SIGINT else Stopped
                self._judge(kind("stopped before the ranks had started"))
                for host in self.crew.hosts.values():
                    host.abandon()  # it may be importing for seconds yet
            elif twice:
                self._judge(Interrupted("stopped at once"))
            else:
                self._stop(how)

    def _stop(self, how: str) -> None:
        """Ask all ranks to end with the step that they are in; whoever asked first, how is remembered."""
        if not self.stopped:
            self.on_event(-1, {"kind": "stopping", "how": how})
        self.stopped = self.stopped or how
        self.crew.stopped = True
        for seat in self.crew.seats:
            for word in ("stop", "hurry") if how == "terminate" else ("stop",):
                seat.tell(word)
        if how == "terminate" and self.grace is not None and self._grace_ends is None:
            self._grace_ends = time.monotonic() + self.grace

    def _replaceable(self, status: int) -> bool:
        return (
            self.changes is not None
            and status < 0
            and all(failure.echo for failure in self.failures)
            and not self._helper_gone
            and self.changes.possible()
        )

    def _train(self, seat: Seat, kind: str | None, event: dict[str, Any]) -> None:
        """Take in how far a rank is."""
        if kind == "step" and seat.rank == 0:
            self.pace.stepped(event["step"])
        if kind == "settled":
            self.crew.settled = event["argument"]
        if self.changes is not None:
            self.changes.heard(seat, kind, event)

    def _missed(self, epoch: int) -> None:
        """A rank misses another. If nobody turns out to be dead, a connection was cut: then all meet anew too."""
        if self.recovery is not None and epoch == self.recovery.epoch and self._deadline is None:
            self._deadline = time.monotonic() + CUT_GRACE

    def _hung(self, error: UnisonoError, epoch: int) -> None:
        """The ranks of an epoch have found whose fault a hang is: one that stands still is replaced, as if it had
        died. If they have met anew since, it is over."""
        if self.recovery is not None and epoch != self.recovery.epoch:
            return
        who, recovery = error.rank, self.recovery if self._replaceable(-signal.SIGKILL) else None
        if error.code == "H01" and who is not None and recovery is not None and recovery.may_hang(who):
            self.on_event(-1, {"kind": "note", "text": error.what})
            self.crew.seats[who].kill()
            return
        self.hung = True
        self._judge(error)

    def _lose(self, lost: list[verdict.Failure], why: str = "") -> None:
        """All ranks meet anew; see `Changes.meet`."""
        if self.changes is not None:
            self._deadline = None
            self.failures.clear()
            self.changes.meet(lost, why)

    def _failed(self, failure: verdict.Failure) -> None:
        self.failures.append(failure)
        if not failure.echo:
            due = time.monotonic() + (ALIKE_GRACE if self._unfinished() else 0.0)
            self._deadline = min(due, self._deadline or due)
        elif self._deadline is None:
            self._deadline = time.monotonic() + ECHO_GRACE

    def _patience(self) -> float | None:
        """Seconds until something is due, None for never."""
        due = [self.board.store.next_deadline(), self._deadline, self._silence_ends(), self._grace_ends]
        if self.recovery is not None and not self._ending:
            due.append(self.recovery.next_look())
        if self.company is not None:
            due += [time.monotonic() + BEAT, self.company.next_deadline(self._begun)]
        times = [time_ for time_ in due if time_ is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _silence_ends(self) -> float | None:
        if self.hung or self._judged is not None:
            return None
        heard = [seat.heard for seat in self.crew.seats if not seat.reported() and seat.process is not None]
        return min(heard) + self.pace.silence() if heard else None

    def _mind_the_time(self) -> None:
        now = time.monotonic()
        self.board.mind_the_time()
        if self.company is not None:
            self._mind_hosts(self.company, now)
        if self._grace_ends is not None and self._grace_ends <= now:
            self._grace_ends = None
            self._judge(self._judged or Stopped(out_of_grace(self.grace or 0.0)))
        ends = self._silence_ends()
        if ends is not None and ends <= now:
            self.hung = True
            self._deadline = now + STACK_GRACE
            for seat in self._unfinished():
                seat.lines.clear()
                seat.kill(PRINT)  # faulthandler writes the stack to the rank's output
        if self.recovery is not None and not self._ending and self.recovery.looks(now):
            for seat in self.crew.seats:
                if self.recovery.stands(seat.rank, seat.is_stopped(), now):
                    seat.kill()
        if self._deadline is not None and self._deadline <= now and self._judged is None:
            if self._replaceable(-signal.SIGKILL) and not self.hung:
                self._lose([])
            else:
                self._judge(self._find_error())

    def _mind_hosts(self, company: Company, now: float) -> None:
        for number, host in list(self.crew.hosts.items()):
            if not host.beat(now):
                self._host_lost(number)
        company.reception.expire()
        if not self._begun and not self._ending and (error := company.missing(self.crew.hosts.values(), now)):
            self._judge(error)

    def _unfinished(self) -> list[Seat]:
        return [seat for seat in self.crew.seats if not seat.reported() and seat.status is None]

    def _find_error(self) -> UnisonoError:
        if not self.failures:
            return verdict.hang([seat.stands() for seat in self._unfinished()], self.pace.silence())
        failure = verdict.culprit(self.failures)
        alike = verdict.alike(failure, self.failures)
        others = [seat.rank for seat in self.crew.seats if seat.rank not in alike]
        seat = self.crew.seats[failure.rank]
        return verdict.judge(failure, alike, others, seat.host.name, seat.lines)

    def _judge(self, error: UnisonoError) -> None:
        self._judged = error
        self._take_down()

    def _take_down(self) -> None:
        self._ending = True
        for seat in self.crew.everyone():
            seat.kill()

    def _outcome(self) -> Outcome:
        seats, ranks = self.crew.seats, self.crew.spread.ranks
        results = [seat.result for seat in seats] + [None] * (ranks - len(seats))
        if self.unborn is not None:
            unborn = crossing.revive(self.unborn, None, self.host)
            return Outcome(results, unborn, unborn.exit)
        error = self._judged
        if error is None and self._helper_gone and all(failure.echo for failure in self.failures):
            done = self.recovery is not None and any(seat.finished for seat in seats[:1])
            error = None if done else helper_killed(self.host)
        elif error is None and self.failures:
            error = self._find_error()
        return ended(results, error, self.stopped)
