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
from unisono.launch.pace import StepPace
from unisono.launch.seats import Seat, seat_pair
from unisono.launch.signals import Signals
from unisono.launch.store import StoreServer
from unisono.spec.errors import Interrupted, Stopped, UnisonoError, UserCodeError

ECHO_GRACE = 2.0
"""Seconds to wait for the true failure after one that is only an echo of another."""
ALIKE_GRACE = 0.3
"""Seconds in which other ranks may fail too after one that did: what all raise is no fault of one of them."""
STACK_GRACE = 0.5
"""Seconds that ranks get to write their stacks in a hang."""

OnEvent = Callable[[int, dict[str, Any]], None]


@dataclass(frozen=True)
class Outcome:
    """How a run ended: one result a rank (None where there is none), the error to show, the exit code.

    `stopped` is "interrupt" (Ctrl-C) or "terminate" (SIGTERM) when the run ended because it was asked to; then `exit`
    is 130 or 75, and `error` is None if the ranks ended in good order.
    """

    results: list[dict[str, Any] | None]
    error: UnisonoError | None
    exit: int
    stopped: str = ""


@dataclass
class Supervision:
    """State of one run; `control` leads to the helper, `abandon` kills it, `pace` says how long ranks may be silent."""

    control: socket.socket
    ranks: int
    on_event: OnEvent
    pace: StepPace
    host: str
    abandon: Callable[[], None]
    seats: list[Seat] = field(default_factory=list)
    store: StoreServer = field(default_factory=StoreServer)
    failures: list[verdict.Failure] = field(default_factory=list)
    stopped: str = ""
    helper_gone: bool = False
    unborn: crossing.Record | None = None
    hung: bool = False
    _judged: UnisonoError | None = None
    _ending: bool = False
    _deadline: float | None = None
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def order(self, terms: dict[str, Any], argument: dict[str, Any]) -> None:
        """Ask the helper for the ranks. Raises ConnectionError when it has gone; `watch` then says why."""
        wire.send_message(self.control, {"op": "run", "argument": argument, **terms})
        now = time.monotonic()
        for rank in range(self.ranks):
            seat, theirs = seat_pair(rank, now)
            self.seats.append(seat)
            try:
                wire.send_message(self.control, {"op": "seat", "rank": rank}, theirs)
            finally:
                for fd in theirs:
                    os.close(fd)

    def watch(self, signals: Signals) -> Outcome:
        """Serve and watch the ranks until all are gone; whatever happens here, none of them stays."""
        watch = self._selector.register
        watch(self.control, selectors.EVENT_READ, self._hear_helper)
        watch(signals, selectors.EVENT_READ, lambda: self._signalled(signals))
        for seat in self.seats:
            watch(seat.events, selectors.EVENT_READ, lambda seat=seat: self._hear(seat))
            watch(seat.store, selectors.EVENT_READ, lambda seat=seat: self._serve(seat))
            watch(seat.output, selectors.EVENT_READ, lambda seat=seat: self._relay(seat))
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
                self._buried(self.seats[message["rank"]], message["status"])
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
                case "hang":
                    self.hung = True
                    self._judge(crossing.revive(event["error"], None, self.host))
                case kind:
                    if kind == "step" and seat.rank == 0:
                        self.pace.stepped(event["step"])
                    self.on_event(seat.rank, event)
        if all(other.reported() for other in self.seats):
            for other in self.seats:
                other.tell("leave")
        return events is not None

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
            self._failed(verdict.Failure(seat.rank, None, status))

    def _forget(self, file: socket.socket | int) -> None:
        try:
            self._selector.unregister(file)
        except KeyError:
            pass

    def _signalled(self, signals: Signals) -> None:
        for number in signals.take():
            twice = self.stopped == "interrupt" and number == signal.SIGINT
            how = "interrupt" if number == signal.SIGINT else "terminate"
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
        due = [self.store.next_deadline(), self._deadline, self._silence_ends()]
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
        ends = self._silence_ends()
        if ends is not None and ends <= now:
            self.hung = True
            self._deadline = now + STACK_GRACE
            for seat in self._unfinished():
                seat.lines.clear()
                seat.kill(signal.SIGUSR1)  # faulthandler writes the stack to the rank's output
        if self._deadline is not None and self._deadline <= now and self._judged is None:
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
            error: UnisonoError | None = crossing.revive(self.unborn, None, self.host)
            return Outcome(results, error, error.exit)
        error = self._judged
        if error is None and self.failures:
            error = self._find_error()
        if error is None and self.helper_gone:
            error = UserCodeError(
                "the process that starts the ranks was killed",
                likely="the kernel ran out of memory (dmesg says so), or somebody killed it",
                host=self.host,
                code="R02",
            )
        code = error.exit if error is not None else {"": 0, "interrupt": 130, "terminate": 75}[self.stopped]
        return Outcome(results, error, code, self.stopped)
