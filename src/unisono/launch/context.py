"""What a rank is told about itself, and the channel to its supervisor. No torch."""

import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from unisono.launch import wire
from unisono.launch.crossing import is_echo
from unisono.launch.pace import StepPace
from unisono.launch.rank_status import process_state, ran
from unisono.spec.errors import PeerGone, Stopped, UnisonoError, out_of_grace
from unisono.spec.rendezvous import Paused, RankMeeting, Rendezvous

LATEST = 60.0
"""Seconds in which the supervisor says that ranks meet anew, if they do."""
STUCK = 4.0
"""Seconds for which a main thread that is called to a meeting may stand still."""
AGAIN = 0.05
"""Seconds between two looks at whether a main thread that is called to a meeting has come."""

FOR_PEOPLE = ("step", "doing", "note", "val")
"""Kinds of event on which nothing depends but what is shown."""


class Channel(ABC):
    """A rank's channel to its supervisor: events go up, the request to stop comes down. hears: whether one can come."""

    hears: bool = False

    @abstractmethod
    def send(self, kind: str, **fields: Any) -> None:
        """Report an event. Never blocks and never raises on a slow or absent listener."""

    @abstractmethod
    def stop_requested(self) -> bool:
        """True once a stop was asked for (Ctrl-C, SIGTERM): finish the step, save, leave.

        Ranks may hear it at different steps; the caller agrees on one step over a collective.
        """

    def rendezvous(self, error: BaseException) -> Rendezvous | None:
        """Whether ranks meet anew since `error` was raised here, because one was lost; None where nobody replaces it,
        or the error is this rank's own. Waits until it is known."""
        return None

    def moves(self) -> bool:
        """After all ranks have agreed to end with this step: whether that is to meet anew rather than to end the run.
        Waits until it is known here."""
        return False

    def hurried(self) -> bool:
        """True once a scheduler asked for the end (SIGTERM, SIGUSR1): all is to be over within the grace."""
        return False

    def hurry(self) -> None:
        """Another rank was asked so, and this one hears of it from there."""
        return

    def drain(self) -> None:
        """The step under way is given up: what the main thread meets from now on is no failure."""
        return

    def drained(self, text: str) -> None:
        """All ranks have saved, within a step: end the run now, with `text`. Called by a thread beside the main one."""
        return


class NullChannel(Channel):
    """Nobody listens: single-process use, and tests."""

    def send(self, kind: str, **fields: Any) -> None:
        return

    def stop_requested(self) -> bool:
        return False


class _Stillness:
    """For how long the main thread has stood still since it was called to a meeting: nothing frees a send that Gloo has
    forgotten. One that computes has its time, and so has one at a disk."""

    def __init__(self, pace: StepPace) -> None:
        self._pace, self._main = (
            pace,
            os.getpid(),
        )  # of the main thread, which a fork leaves unknown to Python
        self._epoch, self._seen, self._since, self._begun = -1, "", 0.0, 0.0

    def lasts(self, epoch: int) -> bool:
        """Whether that is too long. epoch: to which it was called."""
        now, lately = time.monotonic(), ran(self._main)
        if epoch != self._epoch:
            self._epoch, self._begun, self._seen = epoch, now, ""
        if lately != self._seen or process_state(self._main) == "D":
            self._seen, self._since = lately, now
        return now - self._since >= STUCK or now - self._begun >= self._pace.deadline()


class SocketChannel(Channel):
    """The line of a forked rank: JSON frames over a stream socket pair.

    A training step must not wait for a screen: what the kernel's buffer does not take is kept here. Beyond `room` bytes
    of backlog, events that only a person reads (`FOR_PEOPLE`) are dropped, and their number is told when there is room.
    """

    hears = True

    def __init__(self, sock: socket.socket, room: int = 4 << 20, pace: StepPace | None = None) -> None:
        self._sock = sock
        self._pace = pace or StepPace()
        self._room = room
        self._backlog = bytearray()
        self._frames = wire.Frames()
        self._heard: set[str] = set()
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._moving = threading.Lock()  # between meetings; taken before `_lock` where both are
        self._left = False  # the supervisor has
        # This rank's epoch, the latest that it was called to, and the latest for which it was freed.
        self._epoch = self._called = self._freed = 0
        self._meeting: RankMeeting | None = None  # of the latest
        self._away: Callable[[], None] = lambda: None
        self._anew: Callable[[RankMeeting], Any] | None = None
        self.dropped = 0
        self.asked = ""  # by a signal to this rank: "interrupt" or "terminate"

    def recover(self, epoch: int, away: Callable[[], None], anew: Callable[[RankMeeting], Any]) -> None:
        """From now on this rank can meet the others anew. epoch: in which it begins. away(): frees whatever waits for
        other ranks; called by a thread beside as soon as one was lost, and again until the main thread comes to the
        meeting. anew(meeting): the store of it, for the main thread. Never are both called at once."""
        self._epoch = self._called = self._freed = epoch
        self._away, self._anew = away, anew
        threading.Thread(target=self._hear_on, name="unisono-hear", daemon=True).start()

    def _hear_on(self) -> None:
        try:
            self._hear_calls()
        except BaseException:  # a rank that no longer hears of losses is one
            traceback.print_exc()
            os.kill(os.getpid(), signal.SIGKILL)

    def _hear_calls(self) -> None:
        poll, still = select.poll(), _Stillness(self._pace)
        poll.register(self._sock, select.POLLIN)
        while not self._left and "leave" not in self._heard:
            late = self._called > self._epoch
            heard = poll.poll(1000 * AGAIN if late else None)
            with self._lock:
                self._left = bool(heard) and not self._listen(socket.MSG_DONTWAIT)
                called = self._called
            with self._moving:
                if late := called > self._epoch:
                    self._away()
            with self._lock:
                self._freed = called
                self._news.notify_all()
            if late and still.lasts(called):  # a new process takes this one's place
                os.kill(os.getpid(), signal.SIGKILL)

    def rendezvous(self, error: BaseException) -> Rendezvous | None:
        mine = not isinstance(error, PeerGone | Paused) and not is_echo(type(error).__name__, str(error))
        if self._anew is None or (mine and self._called == self._epoch):
            return None
        self.send("paused" if isinstance(error, Paused) else "lost", epoch=self._epoch)
        while True:
            with self._lock:
                self._news.wait_for(lambda: self._is_freed() or self._left, LATEST)
                if not self._is_freed():
                    return None
            with self._moving:
                with self._lock:
                    if not self._is_freed() or self._meeting is None:  # one more was lost just now
                        continue
                    self._epoch, meeting = self._called, self._meeting
                return Rendezvous(meeting, self._anew(meeting))

    def _is_freed(self) -> bool:
        """Whether this rank may go to the latest meeting: one after the other may have been called meanwhile."""
        return self._epoch < self._freed == self._called

    def moves(self) -> bool:
        if self._anew is None:
            return False
        with self._lock:
            self._news.wait_for(lambda: self._heard & {"stop", "move"} or self._left, LATEST)
            return "stop" not in self._heard and not self.asked and "move" in self._heard

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
            if self._anew is None:  # else the thread beside listens
                self._listen(socket.MSG_DONTWAIT)
            return bool(self.asked) or bool(self._heard & {"stop", "move"})

    def hurried(self) -> bool:
        with self._lock:
            if self._anew is None:
                self._listen(socket.MSG_DONTWAIT)
            return "hurry" in self._heard

    def drained(self, text: str) -> None:
        self.send("drained", text=text)

    def _listen(self, flags: int) -> bool:
        """Take in what has come; False when the other side has left."""
        try:
            data = self._sock.recv(4096, flags)
        except BlockingIOError:
            return True
        except OSError:
            return False
        for one in map(wire.event, self._frames.feed(data)):
            self._heard.add(one["kind"])
            if one["kind"] == "regroup" and one.keys() > set(RankMeeting.__slots__):
                self._meeting = RankMeeting.of(one)
                self._called = self._meeting.epoch
                self._heard.discard("move")
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
        if self._anew is not None:
            with self._lock:
                self._news.wait_for(lambda: "leave" in self._heard or self._left)
            return
        while "leave" not in self._heard and self._listen(
            0
        ):  # without the lock: the lookout may have to speak
            pass


@dataclass(frozen=True)
class Ending:
    """How a rank that others started ends when it is asked to. grace: seconds from a SIGTERM to the end of the process,
    None for any number. leave(error): tells the error, ends the process at once. asked: for how many seconds it has
    been asked already, None if it has not."""

    grace: float | None = None
    leave: Callable[[UnisonoError], None] = lambda error: None
    asked: float | None = None


@dataclass
class PrintChannel(Channel):
    """The line of a rank started by others (torchrun, Slurm): `show` draws what rank 0 reports."""

    hears = True

    rank: int
    show: Callable[[int, dict[str, Any]], None] | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    pace: StepPace = field(default_factory=StepPace)
    ending: Ending = Ending()
    asked: list[str] = field(default_factory=list)  # "interrupt", "terminate": as they came
    draining: bool = False
    _timer: threading.Timer | None = None

    def send(self, kind: str, **fields: Any) -> None:
        if kind == "step":
            self.pace.stepped(fields["step"])
        if self.rank == 0 and self.show is not None:
            self.show(0, {"kind": kind, **fields})

    def ask(self, how: str, ago: float = 0.0) -> None:
        """This rank is asked to stop, `ago` seconds ago."""
        first = "terminate" not in self.asked
        self.asked.append(how)
        self.stop.set()
        if len(self.asked) == 1:
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
        return "terminate" in self.asked

    def hurry(self) -> None:
        if not self.hurried():
            self.ask("terminate")

    def drain(self) -> None:
        self.draining = True

    def drained(self, text: str) -> None:
        self.ending.leave(Stopped(text))


@dataclass(frozen=True)
class RankContext:
    """One rank's place in a run.

    `store` is a torch Store for `init_process_group(store=...)`, or None where torch finds its own through the
    environment (`env://`). `backend` is "gloo" or "nccl". `means`: backend and transport, and why these. `appear`: from
    now on, who asks from outside finds this rank in the given folder. epoch: how often ranks have met before.
    `rendezvous`: in which this rank takes a lost one's place among others that train.
    shelf: files in memory that outlive this rank, as whoever takes its place will find them; none where nobody does.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    host: str
    threads: int
    backend: str
    store: Any
    channel: Channel
    run_token: str = field(repr=False)  # a context may come to stand in a traceback
    means: str = ""
    appear: Callable[[Path], None] = lambda folder: None
    epoch: int = 0
    rendezvous: Rendezvous | None = None
    shelf: tuple[int, ...] = ()


def flush_and_leave(code: int) -> NoReturn:
    """End this process at once. torch's own way out aborts at random when Gloo groups are alive."""
    mpi = sys.modules.get("mpi4py.MPI")
    if code == 0 and mpi is not None and not mpi.Is_finalized():
        mpi.Finalize()  # else mpirun takes this rank for one that died, and ends the others
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass
    os._exit(code)
