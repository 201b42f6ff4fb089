"""Watching one run: one thread, one selector, every rank's store, events, output and death. No torch.

The loop ends when every rank is gone. Ranks that finish wait for each other before they leave; when one fails, the
first true failure is found among the echoes it causes, and the rest are killed. Killing outright is safe because
nothing in a run folder is written in place, and quick because a rank inside a collective hears no milder signal.
"""

import contextlib
import os
import select
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from unisono.launch import crossing, verdict, wire
from unisono.launch.outcome import Outcome, ended, helper_killed
from unisono.launch.pace import StepPace
from unisono.launch.recovery import ALIKE_GRACE, CUT_GRACE, ECHO_GRACE, STACK_GRACE, Recovery
from unisono.launch.seats import Seat, seat_pair
from unisono.launch.signals import Signals, meant
from unisono.launch.stand import PRINT
from unisono.launch.store import StoreServer
from unisono.spec.errors import Interrupted, Stopped, UnisonoError, out_of_grace

OnEvent = Callable[[int, dict[str, Any]], None]


@dataclass
class Supervision:
    """State of one run; `control` leads to the helper, `abandon` kills it, `pace` says how long ranks may be silent,
    `grace` within how many seconds of a SIGTERM they are gone. recovery: where ranks that are lost are replaced."""

    control: socket.socket
    ranks: int
    on_event: OnEvent
    pace: StepPace
    host: str
    abandon: Callable[[], None]
    recovery: Recovery | None = None
    grace: float | None = None
    seats: list[Seat] = field(default_factory=list)
    settled: dict[str, Any] = field(
        default_factory=dict
    )  # of the argument, what ranks agreed on at their start
    store: StoreServer = field(default_factory=StoreServer)
    failures: list[verdict.Failure] = field(default_factory=list)
    stopped: str = ""
    helper_gone: bool = False
    unborn: crossing.Record | None = None
    hung: bool = False
    _judged: UnisonoError | None = None
    _ending: bool = False
    _deadline: float | None = None
    _grace_ends: float | None = None
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def order(self, terms: dict[str, Any], argument: dict[str, Any]) -> None:
        """Ask the helper for the ranks. Raises ConnectionError when it has gone; `watch` then says why."""
        wire.send_message(self.control, {"op": "run", "argument": argument, **terms})
        for rank in range(self.ranks):
            self.seats.append(self._send_seat({"op": "seat", "rank": rank}))

    def _send_seat(self, message: dict[str, Any]) -> Seat:
        """A seat for the message's rank, whose ends go to the helper with it."""
        seat, theirs = seat_pair(message["rank"], time.monotonic())
        try:
            wire.send_message(self.control, message, theirs)
        finally:
            for fd in theirs:
                os.close(fd)
        return seat

    def watch(self, signals: Signals) -> Outcome:
        """Serve and watch the ranks until all are gone; whatever happens here, none of them stays."""
        watch = self._selector.register
        watch(self.control, selectors.EVENT_READ, self._hear_helper)
        watch(signals, selectors.EVENT_READ, lambda: self._signalled(signals))
        for seat in self.seats:
            self._watch_seat(seat)
        try:
            while not self._over():
                for key, _ in self._selector.select(self._patience()):
                    key.data()
                self._mind_the_time()
            return self._outcome()
        finally:
            self.on_event = lambda rank, event: None
            self._take_down()
            while not self._over():  # an error of our own: still nobody is left behind
                self._hear_helper()
            self._selector.close()
            for seat in self.seats:
                seat.close()

    def _watch_seat(self, seat: Seat) -> None:
        watch = self._selector.register
        watch(seat.events, selectors.EVENT_READ, lambda: self._hear(seat))
        watch(seat.store, selectors.EVENT_READ, lambda: self._serve(seat))
        watch(seat.output, selectors.EVENT_READ, lambda: self._relay(seat))

    def _over(self) -> bool:
        if self.unborn is not None:
            return True
        if self.helper_gone:  # its ranks die with it; their pidfds say when
            for seat in self.seats:
                if seat.pidfd is not None and seat.status is None:
                    select.select([seat.pidfd], [], [])
                    seat.status = -signal.SIGKILL
            return True
        return len(self.seats) == self.ranks and all(seat.status is not None for seat in self.seats)

    # What comes in.

    def _hear_helper(self) -> None:
        try:
            got = wire.read_message(self.control)
        except OSError:
            got = None
        if got is None:
            self.helper_gone = True
            self._selector.unregister(self.control)
            return
        message, fds = got
        match message["op"]:
            case "born":
                seat = self.seats[message["rank"]]
                seat.pid, seat.pidfd, seat.heard = message["pid"], fds[0], time.monotonic()
                if self._ending:
                    seat.kill()
            case "exit":
                seat = self.seats[message["rank"]]
                if seat.pid == message["pid"]:  # else one whose place is taken already
                    self._buried(seat, message["status"])
            case "failed":
                self.unborn = message["error"]
            case op:
                self.on_event(-1, {"kind": op, **message})

    def _hear(self, seat: Seat) -> bool:
        """Take in some of what a rank says; False when nothing lies there."""
        events = seat.hear()
        for event in events or ():
            seat.heard = time.monotonic()
            match event.get("kind"):
                case "result":
                    seat.finished, seat.result = True, event["value"]
                case "error":
                    seat.error = event["error"]
                    self._failed(verdict.Failure(seat.rank, seat.error))
                case "asked":
                    self._stop(event["how"])
                case "drained":
                    if seat.rank == 0:  # whose part comes last
                        self._judge(Stopped(event["text"]))
                case "hang":
                    self._hung(crossing.revive(event["error"], None, self.host))
                case "lost":
                    self._missed(event["epoch"])
                case kind:
                    self._train(seat, kind, event)
                    self.on_event(seat.rank, event)
        self._let_go()
        return events is not None

    def _let_go(self) -> None:
        if all(seat.reported() for seat in self.seats):
            for seat in self.seats:
                seat.tell("leave")

    def _serve(self, seat: Seat) -> None:
        for request in seat.asked():
            self._reply(self.store.handle(seat.rank, request))
        self._push(seat)

    def _reply(self, answers: list[tuple[int, list[bytes]]]) -> None:
        for who, fields in answers:
            self.seats[who].owed += wire.frame(wire.join(fields))
            self._push(self.seats[who])

    def _push(self, seat: Seat) -> None:
        """Send what the store owes a rank, as much as it takes; the rest when it reads on, so that nobody waits."""
        waits = selectors.EVENT_WRITE if seat.pay() else 0
        with contextlib.suppress(KeyError, ValueError):  # it is gone
            key = self._selector.get_key(seat.store)
            if key.events != selectors.EVENT_READ | waits:
                self._selector.modify(seat.store, selectors.EVENT_READ | waits, key.data)

    def _relay(self, seat: Seat, last: bool = False) -> None:
        lines, more = seat.printed(last)
        for line in lines:
            if not self.hung:
                self.on_event(seat.rank, {"kind": "output", "text": line})
        if last or not more:
            self._forget(seat.output)

    def _buried(self, seat: Seat, status: int) -> None:
        """A rank is gone: hear its last words first, they may still lie in the sockets."""
        seat.status = status
        while self._hear(seat):
            pass
        self._relay(seat, last=True)
        for sock in (seat.events, seat.store):
            self._forget(sock)
        if not seat.reported() and not self._ending:
            failure = verdict.Failure(seat.rank, None, status)
            if self.recovery is not None and self.seats[0].finished:
                seat.finished = True  # all is done and said
                self._let_go()
            elif self._replaceable(status):
                self._lose([failure])
            else:
                self._failed(failure)

    def _forget(self, file: socket.socket | int) -> None:
        try:
            self._selector.unregister(file)
        except KeyError:
            pass

    def _signalled(self, signals: Signals) -> None:
        for number in signals.take():
            twice = self.stopped == "interrupt" and number == signal.SIGINT
            how = meant(number)
            if not all(seat.pid is not None for seat in self.seats):
                self.stopped, kind = how, Interrupted if number == signal.SIGINT else Stopped
                self._judge(kind("stopped before the ranks had started"))
                self.abandon()  # it may be importing for seconds yet
            elif twice:
                self._judge(Interrupted("stopped at once"))
            else:
                self._stop(how)

    def _stop(self, how: str) -> None:
        """Ask all ranks to end with the step that they are in; whoever asked first, how is remembered."""
        if not self.stopped:
            self.on_event(-1, {"kind": "stopping", "how": how})
        self.stopped = self.stopped or how
        for seat in self.seats:
            for word in ("stop", "hurry") if how == "terminate" else ("stop",):
                seat.tell(word)
        if how == "terminate" and self.grace is not None and self._grace_ends is None:
            self._grace_ends = time.monotonic() + self.grace

    # Ranks that are lost are replaced.

    def _replaceable(self, status: int) -> bool:
        return (
            self.recovery is not None
            and status < 0
            and all(failure.echo for failure in self.failures)
            and not self.helper_gone
            and self.recovery.may()
        )

    def _train(self, seat: Seat, kind: str | None, event: dict[str, Any]) -> None:
        """Take in how far a rank is."""
        if kind == "step" and seat.rank == 0:
            self.pace.stepped(event["step"])
        if kind == "settled":
            self.settled = event["argument"]
        if self.recovery is None:
            return
        if kind == "step":
            self.recovery.stepped(event["step"])
        if kind == "ready" and self.recovery.ready(seat.rank) and self.recovery.epoch:
            self.on_event(-1, {"kind": "members", "epoch": self.recovery.epoch, "met": event["step"]})

    def _missed(self, epoch: int) -> None:
        """A rank misses another. If nobody turns out to be dead, a connection was cut: then all meet anew too."""
        if self.recovery is not None and epoch == self.recovery.epoch and self._deadline is None:
            self._deadline = time.monotonic() + CUT_GRACE

    def _hung(self, error: UnisonoError) -> None:
        """The ranks have found whose fault a hang is: one that stands still is replaced, as if it had died."""
        who = error.rank
        recovery = self.recovery if self._replaceable(-signal.SIGKILL) else None
        if error.code == "H01" and who is not None and recovery is not None and recovery.may_hang(who):
            self.on_event(-1, {"kind": "note", "text": error.what})
            self.seats[who].kill()
            return
        self.hung = True
        self._judge(error)

    def _lose(self, lost: list[verdict.Failure]) -> None:
        """New processes take the places of those that are lost, and all ranks meet anew. If the others cannot, since
        they have not begun or have ended, all ranks begin anew, from the newest checkpoint."""
        recovery = self.recovery
        if recovery is None:
            return
        joins = recovery.begun and not any(seat.reported() for seat in self.seats)
        epoch = recovery.change(anew=not joins)
        self._deadline = None
        self.failures.clear()
        self._reply(self.store.interrupt())
        gone = {failure.rank for failure in lost}
        if not joins:
            for seat in self.seats:
                seat.kill()
            gone = set(range(self.ranks))
        why = {one.rank: verdict.how_died(one.status) for one in lost}
        self.on_event(-1, {"kind": "members", "epoch": epoch, "lost": why, "born": sorted(gone)})
        for seat in self.seats:
            if seat.rank not in gone:
                seat.tell("regroup", epoch=epoch)
        for rank in sorted(gone):
            self._replace(rank, {"epoch": epoch, "joins": joins, "settled": self.settled if joins else {}})

    def _replace(self, rank: int, terms: dict[str, Any]) -> None:
        old = self.seats[rank]
        for file in (old.events, old.store, old.output):
            self._forget(file)
        old.close()
        with contextlib.suppress(ConnectionError):  # the helper has gone: `watch` will find that
            self.seats[rank] = seat = self._send_seat({"op": "again", "rank": rank, **terms})
            self._watch_seat(seat)
            if self.stopped:
                seat.tell("stop")

    # What follows from it.

    def _failed(self, failure: verdict.Failure) -> None:
        self.failures.append(failure)
        if not failure.echo:
            due = time.monotonic() + (ALIKE_GRACE if self._unfinished() else 0.0)
            self._deadline = min(due, self._deadline or due)
        elif self._deadline is None:
            self._deadline = time.monotonic() + ECHO_GRACE

    def _patience(self) -> float | None:
        """Seconds until something is due, None for never."""
        due = [self.store.next_deadline(), self._deadline, self._silence_ends(), self._grace_ends]
        if self.recovery is not None and not self._ending:
            due.append(self.recovery.next_look())
        times = [time_ for time_ in due if time_ is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _silence_ends(self) -> float | None:
        if self.hung or self._judged is not None:
            return None
        heard = [seat.heard for seat in self.seats if not seat.reported() and seat.pid is not None]
        return min(heard) + self.pace.silence() if heard else None

    def _mind_the_time(self) -> None:
        now = time.monotonic()
        self._reply(self.store.expire())
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
            for seat in self.seats:
                if self.recovery.stands(seat.rank, seat.is_stopped(), now):
                    seat.kill()
        if self._deadline is not None and self._deadline <= now and self._judged is None:
            if self._replaceable(-signal.SIGKILL) and not self.hung:
                self._lose([])
            else:
                self._judge(self._find_error())

    def _unfinished(self) -> list[Seat]:
        return [seat for seat in self.seats if not seat.reported() and seat.status is None]

    def _find_error(self) -> UnisonoError:
        if not self.failures:
            return verdict.hang([seat.stands(self.host) for seat in self._unfinished()], self.pace.silence())
        failure = verdict.culprit(self.failures)
        alike = verdict.alike(failure, self.failures)
        others = [seat.rank for seat in self.seats if seat.rank not in alike]
        return verdict.judge(failure, alike, others, self.host, self.seats[failure.rank].lines)

    def _judge(self, error: UnisonoError) -> None:
        self._judged = error
        self._take_down()

    def _take_down(self) -> None:
        self._ending = True
        for seat in self.seats:
            seat.kill()

    def _outcome(self) -> Outcome:
        results = [seat.result for seat in self.seats] + [None] * (self.ranks - len(self.seats))
        if self.unborn is not None:
            unborn = crossing.revive(self.unborn, None, self.host)
            return Outcome(results, unborn, unborn.exit)
        error = self._judged
        if error is None and self.failures:
            error = self._find_error()
        if error is None and self.helper_gone:
            error = helper_killed(self.host)
        return ended(results, error, self.stopped)
