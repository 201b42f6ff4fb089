"""The channel between a rank and its supervisor, or whoever draws what it reports. No torch."""

import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from unisono.launch import wire
from unisono.launch.context import Channel, Ending
from unisono.launch.error_record import is_echo
from unisono.launch.pace import StepPace
from unisono.launch.rank_status import process_state, ran
from unisono.spec.errors import PeerGone, Stopped, out_of_grace
from unisono.spec.rendezvous import Paused, RankMeeting, Rendezvous

LATEST = 60.0
"""Seconds in which the supervisor says that ranks meet anew, if they do."""
STUCK = 4.0
"""Seconds for which a main thread that is called to a meeting may stand still."""
AGAIN = 0.05
"""Seconds between two looks at whether a main thread that is called to a meeting has come."""

FOR_PEOPLE = ("step", "doing", "note", "val")
"""Kinds of event on which nothing depends but what is shown."""


class _Stillness:
    """For how long the main thread has stood still since it was called to a meeting: nothing frees a send that Gloo has
    forgotten. One that computes has its time, and so has one at a disk, or one that waits for a slow supervisor."""

    def __init__(self, pace: StepPace) -> None:
        self._pace = pace
        self._main = os.getpid()  # of the main thread, which a fork leaves unknown to Python
        self._epoch, self._seen, self._since, self._begun = -1, "", 0.0, 0.0

    def lasts(self, epoch: int, is_asking: bool = False) -> bool:
        """Whether that is too long. epoch: to which it was called. is_asking: it waits for an answer of the
        supervisor."""
        now, lately = time.monotonic(), ran(self._main)
        if epoch != self._epoch:
            self._epoch, self._begun, self._seen = epoch, now, ""
        if is_asking or lately != self._seen or process_state(self._main) == "D":
            self._seen, self._since = lately, now
        return now - self._since >= STUCK or now - self._begun >= self._pace.deadline()


def _standing(most: int = 4) -> str:
    """Where the main thread is: its innermost frames."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = reversed(traceback.extract_stack(frame)[-most:])
    return ", from ".join(f"{Path(f.filename).name}:{f.lineno} in {f.name}" for f in frames)


class JoinedMeeting(Protocol):
    """A meeting of ranks, as `meetings.Meeting` is one."""

    place: RankMeeting
    store: Any

    def leave(self) -> None: ...

    def is_asking(self) -> bool: ...

    def next(self, place: RankMeeting) -> "JoinedMeeting": ...


class SocketChannel(Channel):
    """The line of a forked rank: JSON frames over a stream socket pair.

    A training step must not wait for a screen: what the kernel's buffer does not take is kept here. Beyond `room` bytes
    of backlog, events that only a person reads (`FOR_PEOPLE`) are dropped, and their number is told when there is room.
    meeting: the one that this rank is in, after `listen`.
    """

    hears = True

    def __init__(self, sock: socket.socket, room: int = 4 << 20, pace: StepPace | None = None) -> None:
        self._sock = sock
        self._pace = pace or StepPace()
        self._room = room
        self._backlog = bytearray()
        self._frames = wire.Frames()
        self._heard: set[str] = set()
        self._questions: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._left = False  # the supervisor has
        self.meeting: JoinedMeeting | None = None
        self._recovers = False
        self._called: RankMeeting | None = None  # the latest that this rank was called to
        self._report: Callable[[dict[str, Any]], dict[str, Any]] = lambda question: {}
        self.dropped = 0
        self.stopping = ""  # asked for by a signal to this rank: "interrupt" or "terminate"

    def listen(
        self,
        meeting: JoinedMeeting,
        recovers: bool,
        report: Callable[[dict[str, Any]], dict[str, Any]] = lambda question: {},
    ) -> None:
        """From now on a thread beside the main one hears what the supervisor says.

        recovers: this rank can be called to other meetings, one after the other. Then the thread leaves the present one
        as soon as it hears the call, and again until the main thread has come. report(question): what this rank says of
        itself when it is asked where it stands.
        """
        self.meeting, self._recovers, self._report = meeting, recovers, report
        threading.Thread(target=self._hear_on, name="unisono-hear", daemon=True).start()

    def _hear_on(self) -> None:
        try:
            self._hear()
        except BaseException:  # a rank that no longer hears of losses is one
            traceback.print_exc()
            os.kill(os.getpid(), signal.SIGKILL)

    def _hear(self) -> None:
        poll, still = select.poll(), _Stillness(self._pace)
        poll.register(self._sock, select.POLLIN)
        while not self._left and "leave" not in self._heard:
            heard = poll.poll(1000 * AGAIN if self._is_called() or self._backlog else None)
            with self._lock:
                self._push()
                self._left = bool(heard) and not self._take_in(socket.MSG_DONTWAIT)
                questions, self._questions = self._questions, []
                meeting, called = self.meeting, self._called
                self._news.notify_all()
            for question in questions:
                self._answer(question)
            if meeting is not None and called is not None and called.epoch > meeting.place.epoch:
                meeting.leave()
                if still.lasts(called.epoch, meeting.is_asking()):  # a new process takes this one's place
                    self.send(
                        "note", text=f"does not come to the next meeting and is replaced: {_standing()}"
                    )
                    os.kill(os.getpid(), signal.SIGKILL)

    def _answer(self, question: dict[str, Any]) -> None:
        try:
            facts = self._report(question)
        except Exception as error:  # the run goes on, and who asks hears why
            facts = {"failed": f"{type(error).__name__}: {error}"}
        self.send("report", token=question.get("token"), **facts)

    def _is_called(self) -> bool:
        """Whether this rank is called to a later meeting than the one that it is in."""
        here, called = self.meeting, self._called
        return here is not None and called is not None and called.epoch > here.place.epoch

    def rendezvous(self, error: BaseException) -> Rendezvous | None:
        mine = not isinstance(error, PeerGone | Paused) and not is_echo(type(error).__name__, str(error))
        here = self.meeting
        if here is None or not self._recovers or (mine and not self._is_called()):
            return None
        self.send("paused" if isinstance(error, Paused) else "lost", epoch=here.place.epoch)
        with self._lock:
            self._news.wait_for(lambda: self._is_called() or self._left, LATEST)
        met = self._next_meeting(here)
        return None if met is here else Rendezvous(met.place, met.store)

    def _next_meeting(self, seen: JoinedMeeting) -> JoinedMeeting:
        """The newest meeting that this rank is called to, `seen` if there is none after that. All earlier ones it has
        left. Only the main thread calls this."""
        while (called := self._called) is not None and called.epoch > seen.place.epoch:
            seen = seen.next(called)  # one more may be lost meanwhile
            with self._lock:
                self.meeting = seen
        return seen

    def moves(self) -> bool:
        if not self._recovers:
            return False
        with self._lock:
            self._news.wait_for(lambda: self._heard & {"stop", "move"} or self._left, LATEST)
            return "stop" not in self._heard and not self.stopping and "move" in self._heard

    def send(self, kind: str, **fields: Any) -> None:
        if kind == "step":
            self._pace.stepped(fields["step"])
        data = wire.frame(wire.dumps({"kind": kind, **fields}))
        with self._lock:
            self._push()
            if kind in FOR_PEOPLE and len(self._backlog) + len(data) > self._room:
                self.dropped += 1
                return
            if self.dropped and kind in FOR_PEOPLE:
                text = f"{self.dropped} events were dropped: nobody took them in"
                self._backlog += wire.frame(wire.dumps({"kind": "note", "text": text}))
                self.dropped = 0
            self._backlog += data
            self._push()

    def _push(self) -> None:
        while self._backlog:
            try:
                sent = self._sock.send(self._backlog, socket.MSG_DONTWAIT)
            except OSError:
                # A full buffer, or no listener any more; in the latter case the kernel is about to end us.
                return
            del self._backlog[:sent]

    def stop_requested(self) -> bool:
        with self._lock:
            if self.meeting is None:  # else the thread beside listens
                self._take_in(socket.MSG_DONTWAIT)
            return bool(self.stopping) or bool(self._heard & {"stop", "move"})

    def hurried(self) -> bool:
        with self._lock:
            if self.meeting is None:
                self._take_in(socket.MSG_DONTWAIT)
            return "hurry" in self._heard

    def drained(self, text: str) -> None:
        self.send("drained", text=text)

    def _take_in(self, flags: int) -> bool:
        """Take in what has come; False when the other side has left."""
        try:
            data = self._sock.recv(4096, flags)
        except BlockingIOError:
            return True
        except OSError:
            return False
        for word in map(wire.event, self._frames.feed(data)):
            self._heard.add(word["kind"])
            if word["kind"] == "regroup" and word.keys() > set(RankMeeting.__slots__):
                self._called = RankMeeting.of(word)
                self._heard.discard("move")
            if word["kind"] == "report":
                self._questions.append(word)
        return bool(data)

    def farewell(self, kind: str, **fields: Any) -> None:
        """Report the last event, whatever it takes, and wait until all ranks have reported theirs.

        Waiting matters: a rank that closed its sockets while another still waits for bytes would look like a failure.
        """
        data = wire.frame(wire.dumps({"kind": kind, **fields}))
        with self._lock:
            self._sock.setblocking(True)
            try:
                self._sock.sendall(bytes(self._backlog) + data)
            except OSError:
                return
            self._backlog.clear()
        if self.meeting is not None:
            with self._lock:
                self._news.wait_for(lambda: "leave" in self._heard or self._left)
            return
        while "leave" not in self._heard and self._take_in(
            0
        ):  # without the lock: the watchdog may have to speak
            pass


@dataclass
class PrintChannel(Channel):
    """The line of a rank started by others (torchrun, Slurm): `show` draws what rank 0 reports."""

    hears = True

    rank: int
    show: Callable[[int, dict[str, Any]], None] | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    pace: StepPace = field(default_factory=StepPace)
    ending: Ending = field(default_factory=Ending)
    stops: list[str] = field(default_factory=list)  # asked for: "interrupt", "terminate": as they came
    draining: bool = False
    _timer: threading.Timer | None = None

    def send(self, kind: str, **fields: Any) -> None:
        if kind == "step":
            self.pace.stepped(fields["step"])
        if self.rank == 0 and self.show is not None:
            self.show(0, {"kind": kind, **fields})

    def ask(self, how: str, ago: float = 0.0) -> None:
        """This rank is asked to stop, `ago` seconds ago."""
        first = "terminate" not in self.stops
        self.stops.append(how)
        self.stop.set()
        if len(self.stops) == 1:
            self.send("stopping", how=how)
        grace = self.ending.grace
        if how == "terminate" and first and grace is not None:
            over = Stopped(out_of_grace(grace))
            self._timer = threading.Timer(max(0.0, grace - ago), self.ending.leave, (over,))
            self._timer.daemon = True
            self._timer.start()

    def over(self) -> None:
        """All ranks have ended in good order, whatever time the rest takes."""
        if self._timer is not None:
            self._timer.cancel()

    def stop_requested(self) -> bool:
        return self.stop.is_set()

    def hurried(self) -> bool:
        return "terminate" in self.stops

    def hurry(self) -> None:
        if not self.hurried():
            self.ask("terminate")

    def drain(self) -> None:
        self.draining = True

    def drained(self, text: str) -> None:
        self.ending.leave(Stopped(text))
